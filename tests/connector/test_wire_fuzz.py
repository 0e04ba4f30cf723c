"""Whatever a client sends, the engine gets valid parameters or a clear refusal."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_integrations.errors import WireError
from kvcomm_integrations.wire import (
    MAX_NAME,
    MAX_SEGMENTS,
    WIRE_KEY,
    KVCommParams,
    RequestReport,
    Segment,
    SegmentKind,
    SegmentReport,
)
from tests.connector.standins import make_half, make_request

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JUNK = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
)
FIELDS = st.sampled_from([*KVCommParams.model_fields, *Segment.model_fields])
SEGMENTISH = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["fixed", "placeholder", "other"]) | JUNK,
        "name": st.text(max_size=5) | JUNK,
        "start": st.integers(-2, 50) | JUNK,
        "end": st.integers(-2, 50) | JUNK,
    },
)
PARAMISH = st.fixed_dictionaries(
    {},
    optional={
        "version": st.sampled_from([1, 1, 1, 2]) | JUNK,
        "agent": st.text(max_size=4) | JUNK,
        "session": st.text(max_size=4) | JUNK,
        "tenant": st.text(max_size=4) | JUNK,
        "segments": st.lists(SEGMENTISH, max_size=4) | JUNK,
        "mode": st.sampled_from(["auto", "dense", "observe"]) | JUNK,
        "policy": st.sampled_from(["ridge", "nonsense"]) | JUNK,
        "audit": st.lists(st.text(max_size=4), max_size=3) | JUNK,
        "audit_tokens": st.integers(-1, 300) | JUNK,
        "response_name": st.text(max_size=4) | JUNK,
        "teach": JUNK,
    },
)


def check(params: KVCommParams, prompt: int) -> None:
    ends = [0]
    for seg in params.segments:
        assert ends[-1] <= seg.start < seg.end <= prompt
        assert seg.name or seg.kind is SegmentKind.FIXED
        ends.append(seg.end)
    assert KVCommParams.from_transfer_params(params.to_transfer_params(), prompt) == params
    json.dumps(params.to_transfer_params())


@settings(max_examples=500, deadline=None)
@given(PARAMISH | st.dictionaries(FIELDS | st.text(max_size=4), JUNK, max_size=5) | JUNK, st.integers(0, 60))
def test_valid_or_refused(raw: Any, prompt: int) -> None:
    try:
        params = KVCommParams.from_transfer_params({WIRE_KEY: raw}, prompt)
    except WireError:
        return
    assert params is not None
    check(params, prompt)


@settings(max_examples=100, deadline=None)
@given(PARAMISH | JUNK)
def test_the_engine_serves_whatever_comes(raw: Any) -> None:
    half = make_half()
    request = make_request(list(range(50)), {"segments": []})
    request.kv_transfer_params = {WIRE_KEY: raw}
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) in (0, None)
    half.update_state_after_alloc(request, (1, 2, 3, 4), 0)
    _, out = half.request_finished(request, [1, 2, 3, 4])
    assert RequestReport.from_transfer_params(out) is not None


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, [], "kvcomm", 5, [WIRE_KEY]])
def test_no_parameters_of_ours(params: Any) -> None:
    assert KVCommParams.from_transfer_params(params, 10) is None


def segments(*spans: tuple[int, int]) -> dict[str, Any]:
    return {"segments": [{"kind": "fixed", "start": start, "end": end} for start, end in spans]}


BAD = {
    "version": {"version": 2},
    "huge version": {"version": 10**6000},
    "beyond the prompt": segments((0, 101)),
    "far beyond the prompt": segments((0, 10**6000)),
    "empty": segments((5, 5)),
    "reversed": segments((9, 5)),
    "negative": segments((-1, 5)),
    "overlap": segments((0, 10), (9, 20)),
    "out of order": segments((10, 20), (0, 5)),
    "a million": segments() | {"segments": [{}] * 1_000_000},
    "too many": {"segments": segments(*((i, i + 1) for i in range(MAX_SEGMENTS + 1)))["segments"]},
    "not a list": {"segments": {"kind": "fixed", "start": 0, "end": 1}},
    "fraction": segments((0, 1.5)),  # type: ignore[arg-type]
    "huge agent": {"agent": "a" * (MAX_NAME + 1)},
    "huge name": {"segments": [{"kind": "placeholder", "name": "n" * (MAX_NAME + 1), "start": 0, "end": 1}]},
    "no name": {"segments": [{"kind": "placeholder", "start": 0, "end": 1}]},
    "lone surrogate": {"agent": "\ud800"},
    "unknown field": {"agnet": "a"},
    "not a string key": {1: 2},
    "mode": {"mode": "fast"},
    "many audits": {"audit": ["ridge"] * 17},
    "list": [],
    "text": "auto",
    "null": None,
}


@pytest.mark.parametrize("raw", BAD.values(), ids=BAD.keys())
def test_refused_with_a_reason(raw: Any) -> None:
    with pytest.raises(WireError) as caught:
        KVCommParams.from_transfer_params({WIRE_KEY: raw}, 100)
    assert len(str(caught.value)) < 1000


@given(
    st.builds(SegmentReport, kind=st.sampled_from(SegmentKind), name=st.text(), start=st.integers(), end=st.integers())
)
def test_reports_come_back_as_they_went(segment: SegmentReport) -> None:
    report = RequestReport(segments=(segment,), reason="r")
    wired = json.loads(json.dumps({WIRE_KEY: report.model_dump(mode="json")}))
    assert RequestReport.from_transfer_params(wired) == report


def _nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


@pytest.mark.parametrize(
    "raw",
    [
        {"segments": [{"kind": "placeholder", "name": "x", "start": i, "end": i + 1} for i in range(1_000_000)]},
        {"segments": {str(i): i for i in range(1_000_000)}},
        {"segments": "x" * 10_000_000},
        {"segments": [_nested(100_000)]},
        {"segments": [{"kind": "placeholder", "name": "x", "start": 10**400, "end": 2}]},
        {"audit": ["ridge"] * 1_000_000},
        {"agent": "x" * 50_000_000},
        {"agent": _nested(100_000)},
        {"x" * 10_000_000: 1},
        {str(i): i for i in range(1_000_000)},
    ],
    ids=lambda raw: next(iter(raw))[:8],
)
def test_whatever_is_huge_is_refused_at_once_and_briefly(raw: Any) -> None:
    started = time.perf_counter()
    with pytest.raises(WireError) as refused:
        KVCommParams.from_transfer_params({WIRE_KEY: raw}, 100)
    assert time.perf_counter() - started < 1
    assert len(str(refused.value)) < 2000
