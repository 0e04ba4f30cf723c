"""The gate: whether a content may be loaded over an edge, and how deep it must be repaired. Numbers only, no tensors.

Inside one domain no cheap signal tells a good reuse from a bad one, so depth follows what is known of the edge: how
many examples it has learned from, how new the content is to them (leverage), and what audits have measured.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from kvcomm_integrations.config import Gate, ReuseConfig
from kvcomm_integrations.reuse.edge import Readiness
from kvcomm_integrations.wire import Health

FAMILIAR = 0.8
"""Leverage below which a content is like the examples: the map helped in 391 of 394 measured cases."""
NEW = 1.0
"""Leverage above which it is not: the edge counts as one without examples."""

CONFIDENCE = 1.28
"""Standard errors of a one-sided bound of 90%."""
AUDITS_KEPT = 32
FRESH_EXAMPLES = 8
"""Examples to learn after a verdict before it is given up."""
PROOF = 4
"""Fewest audits that can prove an edge, and that can prove half the depth enough."""
MOST_PROOFS = 3
"""Proofs after which the repair is not made shallower: a quarter of ``mature_depth``."""


@dataclass(frozen=True)
class GateDecision:
    """What the gate says of one content on one edge."""

    load: bool
    """The content may be loaded."""
    repair_depth: int
    """First tokens to be repaired if it is."""
    reason: str
    """Why, for the report."""
    unpredictable: bool = False
    """The policy's own criterion refuses: the whole request is to run densely, so that it becomes an example."""


@dataclass
class EdgeHealth:
    """Audited divergence of an edge, and the verdict it leads to.

    An edge is open until the mean divergence exceeds the limit with confidence; then it repairs deeper; if that does
    not help it is closed. Fresh examples bring it one step back, from deeper to open only if audits agree. An open edge
    whose divergence is small with confidence is proven until audits of its shallower repair say otherwise, and while
    they stay small each proof halves the repair. The divergence of a request spreads about as much as its mean, so
    ``n`` audits know the mean to within ``mean / sqrt(n)``.
    """

    verdict: Health = Health.OPEN
    audits: deque[float] = field(default_factory=lambda: deque(maxlen=AUDITS_KEPT))
    """Divergences since the last change of verdict, nats."""
    last: float | None = None
    """The latest divergence, nats; ``None`` before the first audit."""
    reason: str = ""
    """Why the verdict is not what it was at first; empty if it never changed."""
    proofs: int = 0
    """How often it has been proven in a row; 0 unless it is proven."""
    _most_proofs: int = MOST_PROOFS
    """Further proofs are not sought: audits of a repair half as deep were too large."""
    _examples: int | None = None
    """Examples when the verdict last changed; ``None`` until they are known."""
    _disproved: bool = False
    """It was proven once and audits took that back; fresh examples give it another chance."""

    def audited(self, divergence: float) -> None:
        """Note one audit, in nats. What is not a number counts as without bound."""
        self.last = math.inf if math.isnan(divergence) else max(0.0, divergence)
        self.audits.append(self.last)

    def judge(self, limit: float, examples: int, small: float = 0.0) -> Health:
        """The verdict now.

        Args:
            limit: most divergence tolerated, nats.
            examples: examples the edge has learned from.
            small: divergence below which it is proven, nats.
        """
        if self._examples is None or examples < self._examples:
            self._examples = examples
        relearned = examples - self._examples >= FRESH_EXAMPLES
        low, high = self.bounds()
        if self.verdict is Health.PROVEN and low > small and self.proofs > 1:
            self._most_proofs = self.proofs - 1
            reason = f"half as deep: more than {low:.3g} nats, {small:g} wanted"
            self._change(Health.PROVEN, examples, reason, self._most_proofs)
        elif self.verdict is Health.PROVEN and low > small:
            self._change(Health.OPEN, examples, f"shallow repair: more than {low:.3g} nats, {small:g} wanted")
            self._disproved = True
        elif self.verdict is not Health.CLOSED and low > limit:
            worse = Health.DEEPER if self.verdict is Health.OPEN else Health.CLOSED
            self._change(worse, examples, f"{len(self.audits)} audits: more than {low:.3g} nats, limit {limit:g}")
        elif self.verdict is Health.CLOSED and relearned:
            self._change(Health.DEEPER, examples, f"closed by audits, then {FRESH_EXAMPLES} fresh examples")
        elif self.verdict is Health.DEEPER and relearned and high < limit:
            self._change(Health.OPEN, examples, f"fresh examples, and audits below {high:.3g} nats")
        elif high < small and self._may_be_proven(relearned):
            reason = f"{len(self.audits)} audits: less than {high:.3g} nats"
            self._change(Health.PROVEN, examples, reason, self.proofs + 1)
        return self.verdict

    def bounds(self) -> tuple[float, float]:
        """Confidence bounds of the mean divergence, nats; ``(0, inf)`` without audits."""
        if not self.audits:
            return 0.0, math.inf
        mean = sum(self.audits) / len(self.audits)
        if math.isinf(mean):
            return mean, mean
        error = CONFIDENCE / math.sqrt(len(self.audits))
        return max(0.0, mean * (1 - error)), mean * (1 + error)

    def _may_be_proven(self, relearned: bool) -> bool:
        """Open, or proven and not yet as often as it can be; after a disproof only with fresh examples."""
        left = self.verdict is Health.OPEN or (self.verdict is Health.PROVEN and self.proofs < self._most_proofs)
        return left and len(self.audits) >= PROOF and (relearned or not self._disproved)

    def _change(self, verdict: Health, examples: int, reason: str, proofs: int = 0) -> None:
        self.proofs = proofs
        self.verdict = verdict
        self.reason = reason
        self.audits.clear()
        self._examples = examples


def decide(
    readiness: Readiness, config: ReuseConfig, *, tokens: int, health: EdgeHealth | None = None, gates: bool = False
) -> GateDecision:
    """Decide on one content.

    Args:
        readiness: what the policy knows of the edge and the content.
        config: thresholds and depths.
        tokens: length of the content.
        health: audits of the edge, if there were any.
        gates: the policy has an entropy criterion, whose value in units of its threshold is the leverage.
    """
    examples = readiness.examples
    small = min(config.small_divergence, config.max_divergence)
    verdict = Health.OPEN if health is None else health.judge(config.max_divergence, examples, small)
    if verdict is Health.CLOSED:
        return GateDecision(False, 0, f"audits found more than {config.max_divergence} nats of divergence")
    if gates and config.gate is Gate.ENTROPY:
        return _by_entropy(readiness)
    trust = _familiarity(readiness.leverage)
    if config.strict and (examples < config.min_examples or trust == 0):
        why = "content is new to the edge" if examples >= config.min_examples else f"{examples} examples"
        return GateDecision(False, 0, f"strict: {why}, {config.min_examples} are needed")
    reach = 2 * config.repair_depth if verdict is Health.DEEPER else config.repair_depth
    deep = min(reach, tokens // 2)
    if verdict is Health.DEEPER:
        return GateDecision(True, deep, "audits ask for deeper repair")
    proofs = 0 if health is None else health.proofs
    least = config.mature_depth >> (proofs - 1) if proofs else max(config.mature_depth, tokens // 8)
    shallow = min(deep, least)
    maturity = trust * min(1.0, examples / config.mature_examples)
    depth = deep - math.floor((deep - shallow) * maturity)
    if proofs and maturity == 1:
        return GateDecision(True, depth, "audits prove a shallow repair enough")
    return GateDecision(True, depth, _reason(readiness, trust, config))


def _by_entropy(readiness: Readiness) -> GateDecision:
    """The papers' anchor prediction: load if the entropy over anchors is within its threshold."""
    if readiness.leverage is None:
        return GateDecision(False, 0, f"entropy gate: {readiness.examples} anchors cannot predict it", True)
    relation = f"entropy {readiness.leverage:.2f} of the threshold over {readiness.examples} anchors"
    if readiness.leverage > 1:
        return GateDecision(False, 0, f"entropy gate: {relation}", True)
    return GateDecision(True, 0, relation)


def _familiarity(leverage: float | None) -> float:
    """1 for contents like the examples, 0 for new ones, a straight line between."""
    if leverage is None:
        return 1.0
    return min(1.0, max(0.0, (NEW - leverage) / (NEW - FAMILIAR)))


def _reason(readiness: Readiness, trust: float, config: ReuseConfig) -> str:
    if readiness.examples == 0:
        return "edge without examples"
    if trust == 0:
        return f"content is new to the edge (leverage {readiness.leverage:.2f})"
    age = "mature" if readiness.examples >= config.mature_examples else "maturing"
    return f"{age} edge, {readiness.examples} examples"
