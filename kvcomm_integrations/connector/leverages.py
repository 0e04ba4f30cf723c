"""How new each held content is to each edge, computed once: at harvest or in the background, not when it is loaded."""

from __future__ import annotations

import torch

from kvcomm_integrations.reuse.policies.base import KV, Edge, Policy
from kvcomm_integrations.reuse.references import Reference


class LeverageBook:
    """Leverages by reference, policy and edge. Entries of an edge go when it learns.

    Args:
        device: where policies keep what they have learned.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._known: dict[int, dict[tuple[str, Edge], float | None]] = {}
        self._generation = 0

    def of(self, name: str, policy: Policy, edge: Edge, reference: Reference) -> float | None:
        """Leverage of a whole reference on an edge; ``None`` where the policy has none.

        Args:
            name: name under which the policy runs.
            policy: asked where the answer is not known.
            edge: the edge.
            reference: the content.
        """
        known = self._known.setdefault(reference.ref_id, {})
        if (name, edge) in known:
            return known[(name, edge)]
        generation = self._generation
        content = KV(reference.keys.to(self._device), reference.values.to(self._device))
        leverage = policy.ready(edge, content).leverage if policy.ready(edge).examples else None
        if generation == self._generation:  # the edge may have learned in the meantime, in another thread
            known[(name, edge)] = leverage
        return leverage

    def learned(self, name: str, edge: Edge) -> None:
        """An edge knows more, or less, than before."""
        self._generation += 1
        for known in list(self._known.values()):
            known.pop((name, edge), None)

    def clear(self) -> None:
        """Forget all, as is due when what edges have learned is replaced."""
        self._generation += 1
        self._known.clear()

    def drop(self, ref_id: int) -> None:
        """Forget a reference; unknown ones are ignored."""
        self._known.pop(ref_id, None)
