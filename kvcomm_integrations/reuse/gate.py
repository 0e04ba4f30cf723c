"""Decides whether a content may be loaded over an edge, and how deep its repair must be. Pure Python, no tensors.

The paper gates on the entropy of anchor weights, which does not tell good reuses from bad ones. Here three things decide:
how many dense examples the edge has learned from, how new the content is to it (leverage), and what audits have shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.reuse.policies.base import Readiness

FAMILIAR_LEVERAGE = 0.8
"""Contents up to here are treated as the edge's maturity says."""
NEW_LEVERAGE = 1.0
"""Contents from here on are treated as on a fresh edge."""
FORGETTING = 0.9
"""Weight that an audit loses with each later one, so that an edge can recover."""
LEAST_AUDITS = 3
"""Audits needed before an edge is judged."""


@dataclass(frozen=True)
class GateDecision:
    """What to do with one content: load it or not, and the number of its first tokens to repair."""

    load: bool
    repair_depth: int
    reason: str


class EdgeState(StrEnum):
    """An edge loads as its maturity says, loads with deep repair only, or does not load."""

    OPEN = "open"
    DEEPER = "deeper"
    CLOSED = "closed"


@dataclass
class EdgeHealth:
    """Audited divergence of one edge, with a confidence bound; recent audits count more.

    An open edge whose divergence is surely beyond the limit repairs deeper; a deeper one closes. A closed edge opens
    again, repairing deeply, after ``mature_examples`` fresh examples.
    """

    state: EdgeState = EdgeState.OPEN
    last: float | None = None
    """Latest audited divergence, nats."""
    weight: float = 0.0
    mean: float = 0.0
    spread: float = 0.0
    """Weighted sum of squared deviations from the mean."""
    closed_at: int = 0
    """Examples the edge had when it closed."""

    def audited(self, divergence: float) -> None:
        """Take in an audit: KL of the first token between the dense run and reuse, nats."""
        self.last = divergence
        self.weight, self.spread = self.weight * FORGETTING + 1, self.spread * FORGETTING
        step = divergence - self.mean
        self.mean += step / self.weight
        self.spread += step * (divergence - self.mean)

    @property
    def lower_bound(self) -> float:
        """The divergence is at least this with about 95 % confidence, nats; 0 before there are enough audits."""
        if self.weight < 1 + FORGETTING + FORGETTING**2 - 1e-9:
            return 0.0
        return max(0.0, self.mean - 1.65 * math.sqrt(self.spread / self.weight / self.weight))

    def judge(self, examples: int, config: ReuseConfig) -> EdgeState:
        """The state now, after moving on if the audits ask for it."""
        if self.state is EdgeState.CLOSED:
            if examples >= self.closed_at + config.mature_examples:
                self._move(EdgeState.DEEPER)
        elif self.lower_bound > config.max_divergence:
            self._move(EdgeState.DEEPER if self.state is EdgeState.OPEN else EdgeState.CLOSED)
            self.closed_at = examples
        elif self.state is EdgeState.DEEPER and self.weight >= LEAST_AUDITS and self.mean < config.max_divergence / 2:
            self._move(EdgeState.OPEN)
        return self.state

    def _move(self, state: EdgeState) -> None:
        self.state = state
        self.weight = self.mean = self.spread = 0.0


def decide(
    readiness: Readiness, config: ReuseConfig, *, tokens: int, health: EdgeHealth | None = None
) -> GateDecision:
    """Whether a content of ``tokens`` tokens may be loaded over an edge, and how deep its repair must be.

    Args:
        readiness: what the policy knows of the edge and of the content.
        config: depths and thresholds.
        tokens: length of the content.
        health: what audits of the edge have shown; ``None`` if there were none.
    """
    examples, leverage = readiness.examples, readiness.leverage
    state = health.judge(examples, config) if health is not None else EdgeState.OPEN
    if state is EdgeState.CLOSED:
        return GateDecision(False, 0, "edge closed: audits diverged too far")
    if config.strict and examples < config.min_examples:
        return GateDecision(False, 0, f"strict: {examples} of {config.min_examples} examples")
    deep = min(config.repair_depth, tokens // 2)
    shallow = min(deep, max(config.mature_depth, tokens // 8))
    if state is EdgeState.DEEPER:
        return GateDecision(True, deep, "deep repair: audits diverged")
    if examples == 0:
        return GateDecision(True, deep, "fresh edge: deep repair")
    maturity = min(1.0, examples / config.mature_examples)
    reason = f"{examples} example{'s' if examples > 1 else ''}"
    if leverage is not None and leverage > FAMILIAR_LEVERAGE:
        familiar = max(0.0, (NEW_LEVERAGE - leverage) / (NEW_LEVERAGE - FAMILIAR_LEVERAGE))
        maturity *= familiar
        reason += f", content {'new' if familiar == 0 else 'partly new'} to the edge (leverage {leverage:.2f})"
    return GateDecision(True, round(deep + (shallow - deep) * maturity), reason)
