"""The default policy: a small affine map per layer and head, learned from dense prefills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcomm_integrations.reuse.affine import Correction
from kvcomm_integrations.reuse.edge import Edge, Readiness
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.policies.learning import LearningPolicy, check_example
from kvcomm_integrations.reuse.regression import EdgeRegression
from kvcomm_integrations.reuse.scratch import Scratch

PENALTIES = (0.3, 3.0)
"""The least and the greatest penalty that `penalty_for` chooses."""


def penalty_for(tokens: int, features: int) -> float:
    """The penalty that held-out contents preferred, by how many tokens there were to learn from.

    What counts is tokens per feature, not examples: two documents of 500 tokens want as little as sixteen questions of
    60. Contents unlike the examples would want more; leverage shrinks their correction instead.
    """
    least, most = PENALTIES
    return min(most, max(least, 6.0 * features / max(tokens, 1)))


@dataclass
class Ridge(LearningPolicy[EdgeRegression]):
    """Ridge regression from a reference to its correction, per (edge, layer, KV head).

    With the standardised reference ``z`` of a token (``[K_h | V_h]`` before rotation, and a few features of its
    position) and the correction ``d = true - reference``, the estimate is ``reference + mean(d) + z W`` where
    ``W = (cov(z) + penalty I)^-1 cov(z, d)``. State is constant in examples and context length, additive, and
    independent of the order of examples. It counts the maps solved of it from the start.

    Args:
        rank (int, 32): rank the map is cut to before use, in the metric of its output; ``2 * head_dim`` keeps all.
        penalty (float | None, None): ridge penalty in units of a channel's variance; ``None`` takes 3 for the first
            few hundred tokens, falling to 0.3 as they grow.
        max_bytes (int, 1 GiB): budget for all edges; the least recently used are evicted.
    """

    name: ClassVar[str] = "ridge"

    rank: int = 32
    penalty: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("rank", 1)
        if self.penalty is not None:
            self._check_range("penalty", 1e-9)

    def observe(self, edge: Edge, reference: KV, truth: KV) -> None:
        """Add the moments of one example. A segment without tokens teaches nothing and is not counted.

        Raises:
            ValueError: shapes disagree, with each other or with earlier examples.
        """
        tokens = check_example(reference, truth)
        layers, kv_heads, _, head_dim = truth.keys.shape
        if tokens == 0 or layers == 1:
            return
        state = self._use(edge) or EdgeRegression.empty(layers, kv_heads, head_dim, self.rank, truth.keys.device)
        state.learn(reference, truth)
        self._keep(edge, state)

    def observe_further(self, edge: Edge, reference: KV, truth: KV, start: int) -> None:
        """Add the moments of the same example's later tokens; nothing if the edge has been forgotten since."""
        state = self._use(edge)
        if state is not None and check_example(reference, truth):
            state.learn(reference, truth, start)

    def ready(self, edge: Edge, reference: KV | None = None) -> Readiness:
        """Ready from the first example on."""
        state = self.states.get(edge)
        if state is None:
            return Readiness(examples=0, ready=False, reason="edge has no examples")
        leverage = state.leverage(reference) if reference is not None and reference.keys.shape[2] else None
        return Readiness(examples=state.examples, ready=True, leverage=leverage)

    def correct(self, edge: Edge, reference: KV, start: int = 0) -> KV:
        """Reference plus mean correction plus the map's part, which shrinks as ``0.8 / leverage`` above 0.8."""
        if edge not in self.states or reference.keys.shape[2] == 0:
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
        state = self._use(edge)
        if state is None or reference.keys.shape[2] == 0:
            return None
        return state.correction(reference, start, self._penalty(state), leverage)

    def prepare(self, edge: Edge) -> None:
        """Solve the edge's map if it has learned since it was solved last."""
        state = self.states.get(edge)
        if state is not None:
            state.prepare(self._penalty(state))

    def merge(self, learned: Mapping[Edge, EdgeRegression]) -> None:
        """Take in what was learned elsewhere, as if its examples had been observed here. Nothing of it is shared."""
        for edge, theirs in learned.items():
            mine = self._use(edge) or theirs.blank(self.rank)
            mine.merge(theirs)
            self.states[edge] = mine
        self._evict()

    def _penalty(self, state: EdgeRegression) -> float:
        if self.penalty is not None:
            return self.penalty
        return penalty_for(state.moments.rows, state.moments.features)
