"""Plans: every token is accounted for, whatever the candidates and limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_integrations.planning.content_keys import ContentKey
from kvcomm_integrations.planning.entries import Entry, EntryState, Reservation
from kvcomm_integrations.planning.plan import Candidate, Limits, Plan, describe, make_plan
from kvcomm_integrations.planning.resolved_prompt import cover
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.wire import Segment, SegmentKind

EDGE = Edge("agent", "other", "n")


def entry(tokens: int, *, exact: bool = False) -> Entry:
    reserved = Reservation(ContentKey("s", "c"), tokens, "n", "agent", dense=True, exact=exact, length=tokens)
    return Entry(1, reserved, tokens, EntryState.READY)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[Segment]]:
    """A prompt's length and segments that may leave gaps."""
    position, segments = 0, []
    for number in range(draw(st.integers(0, 6))):
        start = position + draw(st.integers(0, 9))
        position = start + draw(st.integers(1, 20))
        kind = draw(st.sampled_from(SegmentKind))
        segments.append(Segment(kind=kind, name=f"n{number}", start=start, end=position))
    return position + draw(st.integers(0 if position else 1, 9)), segments


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, list[Candidate], Limits]:
    prompt, segments = draw(layouts())
    candidates = []
    for segment in cover(segments, prompt):
        length = segment.end - segment.start
        offset = draw(st.integers(0, 3))
        held = draw(st.none() | st.integers(max(1, length - 1), length))
        copied = segment.start == 0 and segment.kind is SegmentKind.FIXED and draw(st.booleans())
        if copied:
            candidates.append(Candidate(segment, EDGE, entry(length, exact=True)))
        elif held is None:
            candidates.append(Candidate(segment, EDGE, reason="not seen before"))
        else:
            depth = draw(st.integers(0, length))
            candidates.append(Candidate(segment, EDGE, entry(held + offset), depth, "why", 0.5, 2, offset))
    limits = Limits(draw(st.booleans()), draw(st.floats(0, 1)), draw(st.integers(0, 60)))
    return prompt, draw(st.integers(0, prompt)), candidates, limits


@settings(max_examples=400, deadline=None)
@given(cases())
def test_every_plan_keeps_its_word(case: tuple[int, int, list[Candidate], Limits]) -> None:
    prompt, exact, candidates, limits = case
    plan = make_plan(prompt, exact, candidates, limits)
    if isinstance(plan, str):
        assert plan
        return
    assert plan.exact == exact
    assert exact < plan.end <= prompt - 1
    assert plan.exact + plan.external + (prompt - plan.end) == prompt
    assert plan.loaded + plan.copied + plan.repaired == plan.external
    assert plan.repaired == sum(end - start for start, end in plan.gaps)
    assert plan.repaired <= limits.max_tokens
    assert plan.repaired <= limits.max_share * plan.external
    assert limits.repair or not plan.gaps
    marks = [0] * prompt
    for start, end in plan.gaps:
        for token in range(start, end):
            marks[token] += 1
    for span in plan.spans:
        candidate = candidates[span.candidate]
        assert candidate.entry is not None and exact <= span.start < span.end <= candidate.segment.end
        assert span.start >= candidate.segment.start + candidate.depth
        offset = candidate.offset + span.start - candidate.segment.start
        assert offset + span.end - span.start <= candidate.entry.tokens  # the reference holds all that is loaded
        for token in range(span.start, span.end):
            marks[token] += 1
    assert marks == [1 if exact <= token < plan.end else 0 for token in range(prompt)]
    assert plan.spans[-1].end == plan.end
    first = plan.first_approximate
    assert first == min((s.start for s in plan.spans if not s.exact), default=None)


@settings(max_examples=300, deadline=None)
@given(cases(), st.booleans())
def test_reports_add_up(case: tuple[int, int, list[Candidate], Limits], materialised: bool) -> None:
    prompt, exact, candidates, limits = case
    made = make_plan(prompt, exact, candidates, limits)
    plan = made if isinstance(made, Plan) else Plan(exact, exact)
    reports = describe(plan, prompt, candidates, materialised=materialised)
    for report in reports:
        counts = (report.exact, report.loaded, report.repaired, report.computed)
        assert min(counts) >= 0
        assert sum(counts) == report.end - report.start
        assert bool(report.source) == bool(report.loaded)
    done = plan if materialised else Plan(exact, exact)
    assert sum(r.exact for r in reports) == exact + done.copied
    assert sum(r.loaded for r in reports) == done.loaded
    assert sum(r.repaired for r in reports) == done.repaired


@settings(max_examples=200, deadline=None)
@given(cases())
def test_no_prefix_of_the_spans_within_the_limits_loads_more(case: tuple[int, int, list[Candidate], Limits]) -> None:
    prompt, exact, candidates, limits = case
    everything = make_plan(prompt, exact, candidates, Limits(True, 1.0, prompt))
    plan = make_plan(prompt, exact, candidates, limits)
    if isinstance(everything, str):
        assert isinstance(plan, str)
        return
    best = 0
    for number in range(1, len(everything.spans) + 1):
        tried = Plan(exact, everything.spans[number - 1].end, everything.spans[:number])
        fits = tried.repaired <= limits.max_tokens and tried.repaired <= limits.max_share * tried.external
        if fits and (limits.repair or not tried.gaps):
            best = tried.loaded + tried.copied
    assert (plan.loaded + plan.copied if isinstance(plan, Plan) else 0) == best


@given(layouts())
def test_cover_fills_every_gap(layout: tuple[int, list[Segment]]) -> None:
    prompt, segments = layout
    covered = cover(segments, prompt)
    assert [s.start for s in covered] == [0, *(s.end for s in covered[:-1])]
    assert covered[-1].end == prompt
    assert [s for s in covered if s in segments] == segments
    assert all(s.kind is SegmentKind.FIXED for s in covered if s not in segments)


def test_cover_of_an_empty_prompt_is_empty() -> None:
    assert cover([], 0) == []


def test_the_reason_names_what_is_wrong() -> None:
    one = Candidate(Segment(kind=SegmentKind.PLACEHOLDER, name="q", start=0, end=9), EDGE, reason="not seen before")
    assert make_plan(10, 0, [one], Limits(True, 1, 99)) == "not seen before"
    far = Candidate(Segment(kind=SegmentKind.PLACEHOLDER, name="q", start=5, end=9), EDGE, entry(4))
    assert make_plan(10, 0, [far], Limits(True, 1, 3)) == "too much would have to be repaired"
    assert make_plan(10, 0, [far], Limits(False, 1, 99)) == "an unknown segment comes first"


@pytest.mark.timeout(20)
def test_thousands_of_segments_are_planned_in_no_time() -> None:
    kind = SegmentKind.PLACEHOLDER
    candidates = [
        Candidate(Segment(kind=kind, name="q", start=8 * i, end=8 * i + 8), EDGE, entry(8), 1) for i in range(4096)
    ]
    plan = make_plan(8 * 4096, 0, candidates, Limits(True, 1, 1 << 20))
    assert isinstance(plan, Plan) and len(plan.spans) == 4096
    assert sum(r.loaded for r in describe(plan, 8 * 4096, candidates, materialised=True)) == plan.loaded
