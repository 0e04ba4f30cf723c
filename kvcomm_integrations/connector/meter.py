"""Counts what the scheduler decides and hears, interval by interval, in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kvcomm_integrations.connector import metrics
from kvcomm_integrations.connector.circuit_breaker import CircuitBreaker
from kvcomm_integrations.connector.metadata import WorkerReport
from kvcomm_integrations.planning.planner import Planner
from kvcomm_integrations.wire import TREATMENTS, Mode, RequestReport, SegmentReport

T = TypeVar("T", bound=Hashable)

WATCHED = 8
"""Names counted per name that may have a series of its own."""
CHANGES = 3
"""Times the whole set of own series may change over. After that it stays: old series never leave Prometheus."""


class TopLabels(Generic[T]):
    """The most used names, as far as they can be known in bounded memory (space-saving counts, Metwally et al. 2005).

    A name has a series of its own while fewer than ``limit`` have one, and later if it is used twice as much as the
    least used of them. Over time at most ``(1 + CHANGES) * limit`` series are made.

    Args:
        limit: names with series of their own at a time.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._own: set[T] = set()
        self._uses: dict[T, int] = {}
        self._changes_left = CHANGES * limit

    def use(self, name: T) -> bool:
        """Count a use of ``name``; whether it has a series of its own."""
        if self.limit == 0:
            return False
        self._count(name)
        if name in self._own:
            return True
        if len(self._own) >= self.limit:
            least = min(self._own, key=lambda own: self._uses.get(own, 0))
            if not self._changes_left or self._uses[name] <= 2 * self._uses.get(least, 0):
                return False
            self._own.remove(least)
            self._changes_left -= 1
        self._own.add(name)
        return True

    def _count(self, name: T) -> None:
        inherited = 0
        if name not in self._uses and len(self._uses) >= WATCHED * self.limit:
            others = (other for other in self._uses if other not in self._own)
            inherited = self._uses.pop(min(others, key=self._uses.__getitem__))
        self._uses[name] = self._uses.get(name, inherited) + 1


OTHER = "other"
"""Label of everything beyond the most used."""


class ReuseMeter:
    """The scheduler's counters.

    Args:
        limit: agents, and edges, with series of their own.
        planner: whose index and edges are counted, and whose policy's audits are measured.
        breaker: counts faults.
    """

    def __init__(self, limit: int, planner: Planner, breaker: CircuitBreaker) -> None:
        self._policy = planner.config.policy
        self._index = planner.index
        self._edges = planner.edges
        self._breaker = breaker
        self.waiting: Callable[[], int] = lambda: 0
        """Requests that wait to be computed again."""
        self._stats = metrics.ReuseStats()
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
            self._stats.count(metrics.REQUESTS, 1, "aborted")
            return
        self._stats.count(metrics.REQUESTS, 1, "reused" if report.mode is Mode.AUTO else report.mode.value)
        agent = report.agent if self._agents.use(report.agent) else OTHER
        for treatment in TREATMENTS:
            tokens = getattr(report, treatment)
            self._stats.count(metrics.PROMPT_TOKENS, tokens, treatment)
            self._stats.count(metrics.AGENT_TOKENS, tokens, agent, treatment)
        for segment in report.segments:
            if segment.source:
                self._segment(segment, report.agent)
        if report.plan_ms:
            self._stats.observe(metrics.PLAN_SECONDS, report.plan_ms / 1e3)
        if report.mode is Mode.AUTO:
            self._stats.observe(metrics.LOAD_SECONDS, report.load_ms / 1e3)
            self._stats.observe(metrics.REPAIR_SECONDS, report.repair_ms / 1e3)

    def _segment(self, segment: SegmentReport, target: str) -> None:
        edge = (segment.source, target, segment.name)
        labels = edge if self._top_edges.use(edge) else (OTHER, OTHER, OTHER)
        for treatment in TREATMENTS:
            self._stats.count(metrics.EDGE_TOKENS, getattr(segment, treatment), *labels, treatment)

    def acknowledged(self, report: WorkerReport) -> None:
        """Count the audits that workers report."""
        for audit in report.audits:
            self._stats.count(metrics.AUDITS, 1, audit.policy)
            if audit.policy == self._policy:
                self._stats.observe(metrics.AUDIT_DIVERGENCE, audit.kl[0])

    def shadow(self, tokens: int, *, done: bool) -> None:
        """Count a shadow request that is over, and the tokens it has computed."""
        self._stats.count(metrics.SHADOW_REQUESTS, 1, "done" if done else "interrupted")
        self._stats.count(metrics.SHADOW_TOKENS, tokens)

    def delayed(self, seconds: float) -> None:
        """Count a user's request that has met a shadow request."""
        self._stats.observe(metrics.SHADOW_DELAY, seconds)

    def refused(self) -> None:
        """Count a request whose parameters are not valid."""
        self._stats.count(metrics.FAULTS, 1, "request")

    def take(self) -> metrics.ReuseStats | None:
        """Everything since the last call, with the gauges as they are now; ``None`` if nothing happened."""
        self._stats.count(metrics.EVICTIONS, self._new("evictions", self._index.evictions))
        self._stats.count(metrics.TRIPS, self._new("trips", self._breaker.trips))
        for where, total in self._breaker.total.items():
            self._stats.count(metrics.FAULTS, self._new(f"faults {where}", total), where)
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, metrics.ReuseStats()
        taken.gauge(metrics.REFERENCES, len(self._index))
        taken.gauge(metrics.SHADOW_WAITING, self.waiting())
        taken.gauge(metrics.PAUSED, float(bool(self._breaker.refusal())))
        for verdict, edges in self._edges.verdicts().items():
            taken.gauge(metrics.EDGES, edges, verdict.value)
        return taken

    def _new(self, name: str, total: int) -> int:
        """How much a running total has grown since the last call."""
        grown = total - self._counted[name]
        self._counted[name] = total
        return grown
