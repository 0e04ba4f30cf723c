"""The default policy: a small affine map per layer and head, learned from dense prefills."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvcomm_integrations.reuse.affine import Correction
from kvcomm_integrations.reuse.edge import Edge, Readiness
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.policies.policy import Policy
from kvcomm_integrations.reuse.policies.states import EdgeStates, check_example, check_range
from kvcomm_integrations.reuse.regression import EdgeRegression
from kvcomm_integrations.reuse.scratch import Scratch

PENALTIES = (0.3, 3.0)
"""Least and most penalty chosen by itself."""


def penalty_for(tokens: int, features: int) -> float:
    """The penalty that held-out contents preferred, by how many tokens there were to learn from.

    What counts is tokens per feature, not examples: two documents of 500 tokens want as little as sixteen questions of
    60. Contents unlike the examples would want more; leverage shrinks their correction instead.
    """
    least, most = PENALTIES
    return min(most, max(least, 6.0 * features / max(tokens, 1)))


@dataclass
class Ridge(Policy):
    """Ridge regression from a reference to its correction, per (edge, layer, KV head).

    With the standardised reference ``z`` of a token (``[K_h | V_h]`` before rotation, and a few features of its
    position) and the correction ``d = true - reference``, the estimate is ``reference + mean(d) + z W`` where
    ``W = (cov(z) + penalty I)^-1 cov(z, d)``. State is constant in examples and context length, additive, and
    independent of the order of examples.

    Args:
        rank (int, 32): rank the map is cut to before use, in the metric of its output; ``2 * head_dim`` keeps all.
        penalty (float | None, None): ridge penalty in units of a channel's variance; ``None`` takes 3 for the first
            few hundred tokens, falling to 0.3 as they grow.
        max_bytes (int, 1 GiB): budget for all edges; the least recently used are evicted.
    """

    name: ClassVar[str] = "ridge"

    rank: int = 32
    penalty: float | None = None
    max_bytes: int = 1 << 30
    _states: EdgeStates[EdgeRegression] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_range(self.name, "rank", self.rank, 1)
        check_range(self.name, "max_bytes", self.max_bytes, 0)
        if self.penalty is not None:
            check_range(self.name, "penalty", self.penalty, 1e-9)
        self._states = EdgeStates(self.max_bytes)

    def observe(self, edge: Edge, reference: KV, truth: KV) -> None:
        """Add the moments of one example. A segment without tokens teaches nothing and is not counted.

        Raises:
            ValueError: shapes disagree, with each other or with earlier examples.
        """
        tokens = check_example(reference, truth)
        if tokens == 0 or reference.keys.shape[0] == 1:
            return
        state = self._states.get(edge)
        if state is None:
            state = EdgeRegression.empty(truth, self.rank)
        state.learn(reference, truth)
        self._states.put(edge, state)
        self._states.evict()

    def ready(self, edge: Edge, reference: KV | None = None) -> Readiness:
        """Ready from the first example on."""
        state = self._states.peek(edge)
        if state is None:
            return Readiness(examples=0, ready=False, reason="edge has no examples")
        leverage = None
        if reference is not None and reference.keys.shape[2]:
            leverage = float(state.leverage(reference))
        return Readiness(examples=state.examples, ready=True, leverage=leverage)

    def correct(self, edge: Edge, reference: KV, start: int = 0) -> KV:
        """Reference plus mean correction plus the map's part, which shrinks as ``0.8 / leverage`` above 0.8."""
        if self._states.peek(edge) is None or reference.keys.shape[2] == 0:
            return reference
        out = KV(torch.empty_like(reference.keys), torch.empty_like(reference.values))
        for layers, part in self.estimates(edge, reference, start, Scratch(reference.keys.device)):
            out.keys[layers], out.values[layers] = part
        return out

    def estimates(
        self, edge: Edge, reference: KV, start: int, scratch: Scratch, leverage: float | None = None
    ) -> Iterator[tuple[slice, KV]]:
        correction = self.correction(edge, reference, start, leverage)
        return scratch.copies(reference) if correction is None else correction.estimates(reference, scratch)

    def correction(self, edge: Edge, reference: KV, start: int = 0, leverage: float | None = None) -> Correction | None:
        state = self._states.get(edge)
        if state is None or reference.keys.shape[2] == 0:
            return None
        return state.correction(reference, start, self._penalty(state), leverage)

    def prepare(self, edge: Edge) -> None:
        """Solve the edge's map if it has learned since it was solved last."""
        state = self._states.peek(edge)
        if state is not None:
            state.prepare(self._penalty(state))

    def _penalty(self, state: EdgeRegression) -> float:
        if self.penalty is not None:
            return self.penalty
        return penalty_for(state.moments.rows, state.moments.features)

    def state_bytes(self, edge: Edge | None = None) -> int:
        """Bytes of moments and of the maps solved of them, which count from the start."""
        return self._states.state_bytes(edge)

    def forget(self, edge: Edge) -> None:
        """Drop an edge's moments and map."""
        self._states.forget(edge)

    def edges(self) -> tuple[Edge, ...]:
        """Edges with examples, least recently used first."""
        return tuple(self._states)

    def merge(self, other: Ridge) -> None:
        """Take in everything another policy has learned, as if its examples had been observed here."""
        for edge in other.edges():
            theirs = other._states.peek(edge)
            assert theirs is not None
            mine = self._states.get(edge) or theirs.blank(self.rank)
            mine.merge(theirs)
            self._states.put(edge, mine)
        self._states.evict()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What was learned, as plain tensors under readable names (a JSON list of edge and tensor)."""
        tensors: dict[str, torch.Tensor] = {}
        for edge in self.edges():
            state = self._states.peek(edge)
            assert state is not None
            for part, tensor in state.tensors().items():
                tensors[json.dumps([*edge, part])] = tensor
        return tensors

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replace everything by what ``state_dict`` returned."""
        parts: dict[Edge, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            *edge, part = json.loads(key)
            parts.setdefault(Edge(*edge), {})[part] = tensor
        self._states = EdgeStates(self.max_bytes)
        for edge_key, state in parts.items():
            self._states.put(edge_key, EdgeRegression.from_tensors(state, self.rank))
        self._states.evict()
