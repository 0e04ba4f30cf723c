"""What is known of each edge: examples, leverage of contents, audits, and what the gate makes of them."""

from __future__ import annotations

import math
from collections import Counter

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.planning.entries import Entry
from kvcomm_integrations.planning.gate import EdgeHealth, GateDecision, decide
from kvcomm_integrations.reuse.edge import Edge, Readiness
from kvcomm_integrations.reuse.traits import policy_traits
from kvcomm_integrations.wire import EdgeReport, Health


class EdgeTable:
    """Edges by policy, bounded to the ``limit`` most recently used.

    Args:
        config: thresholds and depths.
        limit: most edges remembered.
    """

    def __init__(self, config: ReuseConfig, limit: int = 4096) -> None:
        self._config = config
        self._limit = limit
        self._examples: dict[tuple[str, Edge], int] = {}
        self._health: dict[tuple[str, Edge], EdgeHealth] = {}

    def examples(self, policy: str, edge: Edge) -> int:
        """Dense observations the workers have acknowledged."""
        return self._examples.get((policy, edge), 0)

    def learned(self, policy: str, edge: Edge, examples: int) -> None:
        """Note the workers' count of examples; the least recently updated edge beyond the limit is forgotten."""
        key = (policy, edge)
        self._examples.pop(key, None)
        self._examples[key] = examples
        while len(self._examples) > self._limit:
            oldest = next(iter(self._examples))
            del self._examples[oldest]
            self._health.pop(oldest, None)

    def clear(self) -> None:
        """Forget every edge, with its audits."""
        self._examples.clear()
        self._health.clear()

    def health(self, policy: str, edge: Edge) -> EdgeHealth:
        """Audited divergence of an edge, made on first use."""
        found = self._health.setdefault((policy, edge), EdgeHealth())
        while len(self._health) > self._limit:
            del self._health[next(iter(self._health))]
        return found

    def audited(self, policy: str, edge: Edge, divergence: float) -> None:
        """Note an audit: KL of the first token against the dense run, nats."""
        self.health(policy, edge).audited(divergence)

    def decide(self, policy: str, edge: Edge, entry: Entry, tokens: int) -> GateDecision:
        """Whether a content may be loaded over an edge, and how deep its repair must be."""
        examples = self.examples(policy, edge)
        readiness = Readiness(examples, examples > 0, entry.leverage.get((policy, edge)))
        traits = policy_traits(policy)
        gates = traits is not None and traits.gates
        return decide(readiness, self._config, tokens=tokens, health=self._health.get((policy, edge)), gates=gates)

    def report(self, policy: str, edge: Edge, reference: str) -> EdgeReport:
        """What a request's report says of an edge; ``reference``: why this reference was taken."""
        health = self._health.get((policy, edge)) or EdgeHealth()
        low, high = health.bounds() if health.audits else (None, None)
        seen = f"{len(health.audits)} audits within {self._config.max_divergence:g} nats, or too few to tell"
        return EdgeReport(
            source=edge.source,
            target=edge.target,
            name=edge.name,
            reference=reference,
            health=health.verdict,
            why=health.reason or (seen if health.audits else "no audits yet"),
            audits=len(health.audits),
            divergence=_finite(health.last),
            divergence_low=_finite(low),
            divergence_high=_finite(high),
        )

    def verdicts(self) -> dict[Health, int]:
        """Number of edges, seen by dense observations or audits, by what audits have made of them."""
        known = {key for key, examples in self._examples.items() if examples} | self._health.keys()
        counts = Counter(self._health[key].verdict if key in self._health else Health.OPEN for key in known)
        return {verdict: counts[verdict] for verdict in Health}

    def __len__(self) -> int:
        return len(self._examples)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
