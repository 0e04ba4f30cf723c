"""What a correction policy is, and how to write one.

A new policy is one file in this folder, named like the policy, and one entry in ``reuse/traits.py``. The file holds one
subclass of `Policy`, whose dataclass fields, numbers or booleans, are the policy's options. Every method has a default
that suits a policy which learns nothing, so such a policy is one override::

    @dataclass
    class Faded(Policy):
        \"\"\"Values are scaled down, in all layers but the first.\"\"\"

        name: ClassVar[str] = "faded"

        strength: float = 0.9

        def correct(self, edge: Edge, reference: KV, start: int = 0) -> KV:
            values = reference.values * self.strength
            values[0] = reference.values[0]
            return KV(reference.keys, values)

with the entry ``"faded": PolicyTraits("Faded")``. A policy that learns derives from `LearningPolicy` (``learning.py``),
which keeps one state per edge within a byte budget; it overrides `observe`, `ready` and `correct`, and its entry says
``learns=True``. The tests in ``tests/reuse`` run over every entry.

KV comes and goes as keys without rotation (the pre-RoPE frame) and values, each ``(layers, kv_heads, tokens,
head_dim)``, in the cache's dtype and on its device. Layer 0 depends on nothing but token and position, so a policy must
return it unchanged; nor may it write to the KV it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.reuse.affine import Correction
from kvcomm_integrations.reuse.edge import Edge, Readiness
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.scratch import Scratch
from kvcomm_integrations.reuse.traits import POLICIES, PolicyTraits


@dataclass
class Policy:
    """A way to correct cached KV for another context. The defaults here learn nothing and change nothing."""

    name: ClassVar[str]
    """Its key in ``reuse.traits.POLICIES``."""

    @property
    def traits(self) -> PolicyTraits:
        """What a planner must know of it."""
        return POLICIES[self.name]

    def correct(self, edge: Edge, reference: KV, start: int = 0) -> KV:
        """Estimate the target's KV.

        Args:
            edge: where the content goes. A policy that learns returns the reference for an edge it has not seen.
            reference: KV of the content as its source computed it, each ``(layers, kv_heads, tokens, head_dim)``.
            start: position of the reference's first token within its segment, in tokens; more than 0 when only a part
                of the segment is loaded.

        Returns:
            KV of the reference's shapes, dtype and device.
        """
        return reference

    def estimates(
        self, edge: Edge, reference: KV, start: int, scratch: Scratch, leverage: float | None = None
    ) -> Iterator[tuple[slice, KV]]:
        """`correct` a few layers at a time, which needs no memory for all of them.

        Args:
            edge, reference, start: as for `correct`.
            scratch: where estimates are made.
            leverage: what `ready` said of this content, if it was asked before.

        Yields:
            layers, and their estimate in float32, each ``(layers, kv_heads, tokens, head_dim)``, the keys a view of
            memory ordered channel by channel. The caller may write to it; the next estimate overwrites it.
        """
        yield from scratch.copies(self.correct(edge, reference, start))

    def correction(self, edge: Edge, reference: KV, start: int = 0, leverage: float | None = None) -> Correction | None:
        """The correction as an affine map of each token, which a GPU can apply while it copies.

        Args:
            edge, reference, start, leverage: as for `estimates`.

        Returns:
            ``None`` if it is not affine, or the edge is unknown: use `estimates` then.
        """
        return None

    def select(self, estimate: torch.Tensor, truth: torch.Tensor) -> torch.Tensor | None:
        """Choose tokens to recompute.

        Args:
            estimate: estimated keys of layer 1, ``(kv_heads, tokens, head_dim)``.
            truth: the true ones, same shape.

        Returns:
            indices ``(count,)``, ascending; ``None`` if this policy recomputes nothing.
        """
        return None

    def observe(self, edge: Edge, reference: KV, truth: KV) -> None:
        """Learn from a dense prefill.

        Args:
            edge: what to learn it for.
            reference: KV as a load would start from, each ``(layers, kv_heads, tokens, head_dim)``.
            truth: what the target computed for the same tokens, same shapes.
        """

    def observe_further(self, edge: Edge, reference: KV, truth: KV, start: int) -> None:
        """Learn from a later part of the example that was observed last, if traits say that examples have ``parts``.

        Args:
            edge, reference, truth: as of `observe`.
            start: position of the part's first token within the content.
        """
        raise NotImplementedError(f"{type(self).__name__} learns from whole contents")

    def ready(self, edge: Edge, reference: KV | None = None) -> Readiness:
        """What is known about an edge and, given a content's ``reference`` (as for `correct`), how new that is."""
        return Readiness(examples=0, ready=True, reason="nothing to learn")

    def prepare(self, edge: Edge) -> None:
        """Compute ahead what `correct` and `ready` will need; may run in another thread than they do."""

    def edges(self) -> tuple[Edge, ...]:
        """Edges with learned state, least recently used first."""
        return ()

    def state_bytes(self, edge: Edge | None = None) -> int:
        """Bytes of learned state, of one edge (0 if unknown) or of all."""
        return 0

    def forget(self, edge: Edge) -> None:
        """Drop what was learned for an edge; unknown edges are ignored."""

    def _check_range(self, option: str, low: float, high: float | None = None) -> None:
        """Refuse an option outside ``[low, high]``.

        Raises:
            ConfigurationError: names the option, its value and the bounds.
        """
        value = getattr(self, option)
        if not low <= value or (high is not None and value > high):
            bound = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ConfigurationError(f"policy {self.name!r}: {option}={value!r} must be {bound}")
