"""Deciding what happens to every token of one prompt. Pure functions of what is known at admission; no side effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcomm_integrations.planning.entries import Entry
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.wire import EdgeReport, Segment, SegmentKind, SegmentReport


@dataclass(frozen=True)
class Candidate:
    """A segment, and what the gate says about loading it.

    ``entry`` is ``None`` where nothing may be loaded. The segment begins at token ``offset`` of the entry's reference.
    ``depth`` is the number of first tokens to be repaired.
    """

    segment: Segment
    edge: Edge
    """From whose cache to whose prompt; its source is empty where nothing is held."""
    entry: Entry | None = None
    depth: int = 0
    reason: str = ""
    confidence: float | None = None
    examples: int = 0
    offset: int = 0
    known: EdgeReport | None = None
    """What is known of the edge."""
    unpredictable: bool = False
    """The policy's own criterion asks for a dense run of the whole request."""


@dataclass(frozen=True)
class Limits:
    """Bounds on the repair pass."""

    repair: bool
    max_share: float
    """Largest repaired share of the external tokens."""
    max_tokens: int
    """Most tokens repaired for one request."""


@dataclass(frozen=True)
class Span:
    """Tokens ``[start, end)`` loaded for a candidate (by its position in the list)."""

    start: int
    end: int
    candidate: int
    exact: bool = False
    """An exact copy of the beginning of the same prompt."""


@dataclass(frozen=True)
class Plan:
    """What happens to each prompt token: exact up to ``exact``, external up to ``end``, computed from there on.

    Of the external tokens, those in ``spans`` are loaded and all others repaired.
    """

    exact: int
    end: int
    spans: tuple[Span, ...] = ()

    @property
    def external(self) -> int:
        """Tokens the connector provides."""
        return self.end - self.exact

    @property
    def first_approximate(self) -> int | None:
        """The first token whose KV is an estimate; ``None`` if none is."""
        return next((span.start for span in self.spans if not span.exact), None)

    @property
    def loaded(self) -> int:
        """Tokens loaded from references, with a correction."""
        return sum(span.end - span.start for span in self.spans if not span.exact)

    @property
    def copied(self) -> int:
        """Tokens copied exactly from the beginning of an earlier prompt."""
        return sum(span.end - span.start for span in self.spans if span.exact)

    @property
    def repaired(self) -> int:
        """Tokens for the repair pass."""
        return self.external - self.loaded - self.copied

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Spans for the repair pass, in order."""
        gaps, position = [], self.exact
        for span in self.spans:
            if span.start > position:
                gaps.append((position, span.start))
            position = span.end
        return tuple(gaps)


@dataclass(frozen=True)
class Price:
    """Milliseconds that a plan is expected to take, and those that computing the same tokens would."""

    planned: float
    dense: float


@dataclass(frozen=True)
class Planned:
    """What one policy would do with a prompt."""

    policy: str
    candidates: tuple[Candidate, ...]
    """The segments in order, covering the prompt."""
    plan: Plan | None = None
    reason: str = ""
    """Why there is no plan; empty if there is."""
    price: Price | None = None
    """As far as the engine has measured what loading and computing cost."""


def make_plan(prompt_tokens: int, exact: int, candidates: Sequence[Candidate], limits: Limits) -> Plan | str:
    """The plan that loads most within the limits, or the reason why there is none.

    The last prompt token is always computed by vLLM. A plan ends with a loaded span: what follows is cheaper to
    compute in the ordinary forward than in the repair pass.

    Args:
        prompt_tokens: length of the prompt.
        exact: tokens the prefix cache provides already.
        candidates: segments in order, covering the prompt.
        limits: bounds on the repair pass.
    """
    spans = _loadable(prompt_tokens, exact, candidates)
    if not spans:
        reasons = {c.reason for c in candidates if c.reason and c.segment.kind is SegmentKind.PLACEHOLDER}
        return "; ".join(sorted(reasons)) or "no shared content that is not in the prefix cache already"
    best = provided = 0
    for count, span in enumerate(spans, 1):  # every further span provides more: the last one within the limits is best
        provided += span.end - span.start
        external = span.end - exact
        repaired = external - provided
        if repaired and not limits.repair:
            break
        if repaired <= limits.max_tokens and repaired <= limits.max_share * external:
            best = count
    if not best:
        return "too much would have to be repaired" if limits.repair else "an unknown segment comes first"
    return Plan(exact, spans[best - 1].end, tuple(spans[:best]))


def describe(
    plan: Plan, prompt_tokens: int, candidates: Sequence[Candidate], *, materialised: bool, carried: int = 0
) -> tuple[SegmentReport, ...]:
    """Per segment, how many tokens were exact, loaded, repaired and computed.

    Args:
        materialised: the worker has carried the plan out; if not, external tokens count as computed.
        carried: the last of the plan's exact tokens, which come from the agent's own past.
    """
    reports = []
    by_candidate: dict[int, list[Span]] = {}
    for span in plan.spans if materialised else ():
        by_candidate.setdefault(span.candidate, []).append(span)
    for position, candidate in enumerate(candidates):
        segment = candidate.segment
        external = _overlap(segment, plan.exact, plan.end) if materialised else 0
        spans = by_candidate.get(position, [])
        copied = sum(_overlap(segment, s.start, s.end) for s in spans if s.exact)
        loaded = sum(_overlap(segment, s.start, s.end) for s in spans if not s.exact)
        known = _overlap(segment, 0, plan.exact)
        past = _overlap(segment, plan.exact - carried, plan.exact)
        reports.append(
            SegmentReport(
                kind=segment.kind,
                name=segment.name,
                start=segment.start,
                end=segment.end,
                exact=known - past + copied,
                carried=past,
                loaded=loaded,
                repaired=external - loaded - copied,
                computed=segment.end - segment.start - known - external,
                source=candidate.entry.source if candidate.entry is not None and loaded else "",
                confidence=candidate.confidence if loaded else None,
                examples=candidate.examples,
                reason=candidate.reason,
                edge=candidate.known,
            )
        )
    return tuple(reports)


def _loadable(prompt_tokens: int, exact: int, candidates: Sequence[Candidate]) -> list[Span]:
    spans = []
    for position, candidate in enumerate(candidates):
        if candidate.entry is None:
            continue
        start = max(candidate.segment.start + candidate.depth, exact)
        held = candidate.entry.tokens - candidate.offset
        end = min(candidate.segment.start + held, candidate.segment.end, prompt_tokens - 1)
        if end > start:
            spans.append(Span(start, end, position, candidate.entry.reserved.exact))
    return spans


def _overlap(segment: Segment, start: int, end: int) -> int:
    return max(0, min(segment.end, end) - max(segment.start, start))
