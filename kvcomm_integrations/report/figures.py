"""The numbers behind the report: sums, medians, edges."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median

from kvcomm_integrations.chat.request_log import PHASES, RunRecord
from kvcomm_integrations.wire import TREATMENTS, EdgeReport, Health, Mode, SegmentKind, SegmentReport


@dataclass(frozen=True)
class AgentFigures:
    """Medians of one agent's requests, with reuse and without."""

    name: str
    requests: int
    """Timed requests that could reuse."""
    reuse_ms: float | None
    dense_ms: float | None
    """Time to the first token, milliseconds; ``None`` where no request was timed."""
    reuse: dict[str, float]
    dense: dict[str, float]
    """Each phase, milliseconds; empty where no request was timed."""
    tokens: dict[str, float]
    """Of the requests that could reuse: ``prompt`` and each of ``TREATMENTS``."""

    @property
    def speedup(self) -> float | None:
        """Median time to the first token without reuse over that with reuse; ``None`` without both."""
        return self.dense_ms / self.reuse_ms if self.dense_ms is not None and self.reuse_ms else None


@dataclass
class EdgeFigures:
    """Contents that went from one agent's cache into another agent's prompts."""

    source: str
    target: str
    name: str
    requests: int = 0
    loaded: int = 0
    repaired: int = 0
    examples: int = 0
    confidence: float | None = None
    health: Health = Health.OPEN
    """After the latest audit."""
    why: str = ""
    divergence: float | None = None
    """Last audited KL of the first token, nats."""

    def count(self, part: SegmentReport, told: EdgeReport | None) -> None:
        """Add one more segment, and what its report said of the edge."""
        self.requests += bool(part.loaded)
        self.loaded += part.loaded
        self.repaired += part.repaired
        self.examples, self.confidence, self.why = part.examples, part.confidence, part.reason
        if told is not None:
            self.health, self.divergence, self.why = told.health, told.divergence, told.why or part.reason


@dataclass(frozen=True)
class Totals:
    """Sums over all requests that did not ask to run densely."""

    requests: int
    prompt: int
    tokens: dict[str, int]
    """Prompt tokens by what became of them."""
    errors: int
    audits: int
    observed: int
    """Requests that ran densely so that policies learn from them."""

    @property
    def skipped(self) -> int:
        """Prompt tokens that nobody had to compute."""
        return self.tokens["exact"] + self.tokens["carried"] + self.tokens["loaded"]


def treated(report: RunRecord | SegmentReport) -> dict[str, int]:
    """Tokens of a request or segment by what became of them."""
    return {kind: getattr(report, kind) for kind in TREATMENTS}


def is_dense(record: RunRecord) -> bool:
    """The request asked for a dense run: it is what reuse is compared with."""
    return record.asked is Mode.DENSE


def totals(records: Iterable[RunRecord]) -> Totals:
    """Sums over the requests that did not ask to run densely."""
    counted = [record for record in records if not is_dense(record)]
    return Totals(
        requests=len(counted),
        prompt=sum(record.prompt_tokens for record in counted),
        tokens={kind: sum(getattr(record, kind) for record in counted) for kind in TREATMENTS},
        errors=sum(bool(record.error) for record in counted),
        audits=sum(record.reason == "audit" for record in counted),
        observed=sum(record.reason == "learning" or record.asked is Mode.OBSERVE for record in counted),
    )


def by_agent(records: Sequence[RunRecord]) -> list[AgentFigures]:
    """Figures of each agent, in order of first appearance."""
    figures = []
    for name in dict.fromkeys(record.agent for record in records):
        own = [record for record in records if record.agent == name and not record.error]
        reuse = [record for record in own if record.asked is Mode.AUTO]
        dense = [record for record in own if is_dense(record)]
        tokens = {"prompt": _median([record.prompt_tokens for record in reuse])}
        tokens |= {kind: _median([getattr(record, kind) for record in reuse]) for kind in TREATMENTS}
        timed = sum(record.ttft_ms is not None for record in reuse)
        figures.append(
            AgentFigures(name, timed, _first_ms(reuse), _first_ms(dense), _phases(reuse), _phases(dense), tokens)
        )
    return figures


def _first_ms(records: Iterable[RunRecord]) -> float | None:
    timed = [record.ttft_ms for record in records if record.ttft_ms is not None]
    return _median(timed) if timed else None


def _phases(records: Iterable[RunRecord]) -> dict[str, float]:
    timed = [record.phases for record in records if record.ttft_ms is not None]
    return {phase: _median([phases[phase] for phases in timed]) for phase in PHASES} if timed else {}


def _median(values: Sequence[float]) -> float:
    return float(median(values)) if values else 0.0


def edges(records: Iterable[RunRecord]) -> list[EdgeFigures]:
    """Every edge that contents took or were kept from taking, in order; the latest request says how it stands."""
    found: dict[tuple[str, str, str], EdgeFigures] = {}
    for record in records:
        for part in record.segments:
            told = part.edge
            source = told.source if told is not None else part.source
            if part.kind is SegmentKind.PLACEHOLDER and source:
                key = (source, record.agent, part.name)
                found.setdefault(key, EdgeFigures(*key)).count(part, told)
    return list(found.values())


@dataclass(frozen=True)
class SessionRuns:
    """One session's requests, and the session that did the same densely, if there is one."""

    tenant: str
    session: str
    records: tuple[RunRecord, ...]
    dense: tuple[RunRecord, ...] = ()


def sessions(records: Iterable[RunRecord]) -> list[SessionRuns]:
    """Requests by session, in order of their start. A dense session goes with the one of the same agents before or
    after it, the first with the first."""
    groups: dict[tuple[str, str, bool], list[RunRecord]] = {}
    for record in sorted(records, key=lambda record: record.started):
        groups.setdefault((record.tenant, record.session, is_dense(record)), []).append(record)
    waiting: defaultdict[tuple[str, ...], deque[SessionRuns]] = defaultdict(deque)
    found = []
    for tenant, session, dense in sorted(groups, key=lambda key: not key[2]):
        own = tuple(groups[tenant, session, dense])
        alike = waiting[tuple(record.agent for record in own)]
        if dense:
            alike.append(SessionRuns(tenant, session, own))
        else:
            partner = alike.popleft().records if alike and own[0].asked is Mode.AUTO else ()
            found.append(SessionRuns(tenant, session, own, partner))
    return sorted([*found, *chain(*waiting.values())], key=lambda runs: runs.records[0].started)
