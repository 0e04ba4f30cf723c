"""Counts what the scheduler half decides and hears, interval by interval, in bounded memory."""

from __future__ import annotations

from collections import Counter

from kvcomm_integrations.connector.breaker import CircuitBreaker
from kvcomm_integrations.connector.edges import EdgeBook
from kvcomm_integrations.connector.index import ReferenceIndex
from kvcomm_integrations.connector.labels import TopLabels
from kvcomm_integrations.connector.metadata import WorkerReport
from kvcomm_integrations.connector.series import (
    AGENT_TOKENS,
    AUDIT_DIVERGENCE,
    AUDITS,
    EDGE_TOKENS,
    EDGES,
    EVICTIONS,
    FAULTS,
    LOAD_SECONDS,
    PAUSED,
    PLAN_SECONDS,
    PROMPT_TOKENS,
    REFERENCES,
    REPAIR_SECONDS,
    REQUESTS,
    TRIPS,
)
from kvcomm_integrations.connector.stats import ReuseStats
from kvcomm_integrations.wire import Mode, RequestReport, SegmentReport

OTHER = "other"
"""Label of everything beyond the most used."""
TREATMENTS = ("exact", "loaded", "repaired", "computed")


class Meter:
    """The scheduler half's counters.

    Args:
        limit: agents, and edges, with series of their own.
        policy: the engine's own, whose audits are measured.
        index: references.
        edges: what is known of edges.
        breaker: counts faults.
    """

    def __init__(
        self, limit: int, policy: str, index: ReferenceIndex, edges: EdgeBook, breaker: CircuitBreaker
    ) -> None:
        self._policy = policy
        self._index = index
        self._edges = edges
        self._breaker = breaker
        self._stats = ReuseStats()
        self._agents: TopLabels[str] = TopLabels(limit)
        self._top_edges: TopLabels[tuple[str, str, str]] = TopLabels(limit)
        self._counted: Counter[str] = Counter()
        """Totals of others that have been counted already."""

    def finished(self, report: RequestReport, *, computed: bool) -> None:
        """Count a request that is over.

        Args:
            report: what its client is told.
            computed: its prompt was completed; otherwise its tokens do not count.
        """
        if not computed:
            self._stats.count(REQUESTS, 1, "aborted")
            return
        self._stats.count(REQUESTS, 1, "reused" if report.mode is Mode.AUTO else report.mode.value)
        agent = report.agent if self._agents.use(report.agent) else OTHER
        for treatment in TREATMENTS:
            tokens = getattr(report, treatment)
            self._stats.count(PROMPT_TOKENS, tokens, treatment)
            self._stats.count(AGENT_TOKENS, tokens, agent, treatment)
        for segment in report.segments:
            if segment.source:
                self._segment(segment, report.agent)
        if report.plan_ms:
            self._stats.observe(PLAN_SECONDS, report.plan_ms / 1e3)
        if report.mode is Mode.AUTO:
            self._stats.observe(LOAD_SECONDS, report.load_ms / 1e3)
            self._stats.observe(REPAIR_SECONDS, report.repair_ms / 1e3)

    def _segment(self, segment: SegmentReport, target: str) -> None:
        edge = (segment.source, target, segment.name)
        labels = edge if self._top_edges.use(edge) else (OTHER, OTHER, OTHER)
        for treatment in TREATMENTS:
            self._stats.count(EDGE_TOKENS, getattr(segment, treatment), *labels, treatment)

    def acknowledged(self, report: WorkerReport) -> None:
        """Count the audits that workers report."""
        for audit in report.audits:
            self._stats.count(AUDITS, 1, audit.policy)
            if audit.policy == self._policy:
                self._stats.observe(AUDIT_DIVERGENCE, audit.kl[0])

    def refused(self) -> None:
        """Count a request whose parameters are not valid."""
        self._stats.count(FAULTS, 1, "request")

    def take(self) -> ReuseStats | None:
        """Everything since the last call, with the gauges as they are now; ``None`` if nothing happened."""
        self._stats.count(EVICTIONS, self._new("evictions", self._index.evictions))
        self._stats.count(TRIPS, self._new("trips", self._breaker.trips))
        for seam, total in self._breaker.total.items():
            self._stats.count(FAULTS, self._new(f"faults {seam}", total), seam)
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, ReuseStats()
        taken.gauge(REFERENCES, len(self._index))
        taken.gauge(PAUSED, float(bool(self._breaker.refusal())))
        for verdict, edges in self._edges.verdicts().items():
            taken.gauge(EDGES, edges, verdict.value)
        return taken

    def _new(self, name: str, total: int) -> int:
        """How much a running total has grown since the last call."""
        grown = total - self._counted[name]
        self._counted[name] = total
        return grown
