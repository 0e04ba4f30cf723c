"""The numbers behind the report: sums, medians, edges. No markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from kvcomm_integrations.chat.request_log import PHASES, RunRecord
from kvcomm_integrations.wire import EdgeReport, Mode, SegmentKind, SegmentReport

KINDS = ("exact", "loaded", "repaired", "computed")
"""What can become of a prompt token."""


@dataclass(frozen=True)
class Phases:
    """Medians of several requests, milliseconds."""

    count: int
    ttft_ms: float
    total_ms: float
    phases: dict[str, float]


@dataclass(frozen=True)
class AgentFigures:
    """One agent's requests, with reuse and without."""

    name: str
    reuse: Phases | None
    dense: Phases | None
    tokens: dict[str, float]
    """Medians over the requests that could reuse: ``prompt`` and each of ``KINDS``."""

    @property
    def speedup(self) -> float | None:
        """Median time to the first token without reuse over that with reuse; ``None`` without both."""
        if self.reuse is None or self.dense is None or not self.reuse.ttft_ms:
            return None
        return self.dense.ttft_ms / self.reuse.ttft_ms


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
    health: str = "open"
    """``open``, ``deeper`` (repaired deeper) or ``closed`` (not loaded), after the latest audit."""
    why: str = ""
    audits: int = 0
    divergence: float | None = None
    """Last audited KL of the first token, nats."""


@dataclass
class Totals:
    """Sums over all requests."""

    requests: int = 0
    prompt: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    completion: int = 0
    errors: int = 0
    audits: int = 0
    lessons: int = 0

    @property
    def skipped(self) -> int:
        """Prompt tokens that nobody had to compute."""
        return self.tokens["exact"] + self.tokens["loaded"]


def is_dense(record: RunRecord) -> bool:
    """The request asked for a dense run: it is what reuse is compared with."""
    return record.asked is Mode.DENSE


def totals(records: Iterable[RunRecord]) -> Totals:
    """Sums over the requests that did not ask to run densely."""
    sums = Totals()
    for record in records:
        if is_dense(record):
            continue
        sums.requests += 1
        sums.prompt += record.prompt_tokens
        sums.completion += record.completion_tokens
        sums.errors += bool(record.error)
        sums.audits += record.reason == "audit"
        sums.lessons += record.reason == "learning" or record.asked is Mode.OBSERVE
        for kind in KINDS:
            sums.tokens[kind] += getattr(record, kind)
    return sums


def by_agent(records: Sequence[RunRecord]) -> list[AgentFigures]:
    """Figures of each agent, in order of first appearance."""
    figures = []
    for name in dict.fromkeys(record.agent for record in records):
        own = [record for record in records if record.agent == name and not record.error]
        reuse = [record for record in own if record.asked is Mode.AUTO]
        tokens = {kind: _median([getattr(record, kind) for record in reuse]) for kind in KINDS}
        tokens["prompt"] = _median([record.prompt_tokens for record in reuse])
        figures.append(AgentFigures(name, _phases(reuse), _phases(list(filter(is_dense, own))), tokens))
    return figures


def edges(records: Iterable[RunRecord]) -> list[EdgeFigures]:
    """Every edge that contents took or were kept from taking, in order; the latest request says how it stands."""
    found: dict[tuple[str, str, str], EdgeFigures] = {}
    for record in records:
        for part in record.segments:
            told = part.edge
            source = told.source if told is not None else part.source
            if part.kind is SegmentKind.PLACEHOLDER and source:
                key = (source, record.agent, part.name)
                _count(found.setdefault(key, EdgeFigures(*key)), part, told)
    return list(found.values())


def _count(edge: EdgeFigures, part: SegmentReport, told: EdgeReport | None) -> None:
    edge.requests += bool(part.loaded)
    edge.loaded += part.loaded
    edge.repaired += part.repaired
    edge.examples = part.examples
    edge.confidence = part.confidence
    edge.why = part.reason
    if told is not None:
        edge.health, edge.audits, edge.divergence = told.health, told.audits, told.divergence
        edge.why = told.why or part.reason


@dataclass(frozen=True)
class SessionRuns:
    """One session's requests, and the session that did the same densely, if there is one."""

    tenant: str
    session: str
    records: tuple[RunRecord, ...]
    dense: tuple[RunRecord, ...] = ()

    @property
    def alone_and_dense(self) -> bool:
        """A dense session that no other is compared with."""
        return is_dense(self.records[0])


def sessions(records: Iterable[RunRecord]) -> list[SessionRuns]:
    """Requests by session, in order of their start. A dense session goes with the one of the same agents before or
    after it, the first with the first."""
    groups: dict[tuple[str, str, bool], list[RunRecord]] = {}
    for record in sorted(records, key=lambda record: record.started):
        groups.setdefault((record.tenant, record.session, is_dense(record)), []).append(record)
    waiting: dict[tuple[str, ...], list[tuple[str, str, bool]]] = {}
    for key, own in groups.items():
        if key[2]:
            waiting.setdefault(tuple(record.agent for record in own), []).append(key)
    found, used = [], set()
    for key, own in groups.items():
        if not key[2]:
            partners = waiting.get(tuple(record.agent for record in own), []) if own[0].asked is Mode.AUTO else []
            partner = partners.pop(0) if partners else None
            used.add(partner)
            found.append(SessionRuns(*key[:2], tuple(own), tuple(groups[partner]) if partner else ()))
    found += [SessionRuns(*key[:2], tuple(own)) for key, own in groups.items() if key[2] and key not in used]
    return sorted(found, key=lambda runs: runs.records[0].started)


def _phases(records: Sequence[RunRecord]) -> Phases | None:
    timed = [record for record in records if record.ttft_ms is not None]
    if not timed:
        return None
    return Phases(
        len(timed),
        _median([record.ttft_ms or 0.0 for record in timed]),
        _median([record.total_ms for record in timed]),
        {phase: _median([record.phases[phase] for record in timed]) for phase in PHASES},
    )


def _median(values: Sequence[float]) -> float:
    return float(median(values)) if values else 0.0
