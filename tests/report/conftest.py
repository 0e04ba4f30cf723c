"""Runs to report on: made by hand, and by a chat model on the fake engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcomm_integrations.chat.request_log import RunRecord
from kvcomm_integrations.wire import EdgeReport, Mode, SegmentKind, SegmentReport


def segments(source: str, name: str = "user_question") -> tuple[SegmentReport, ...]:
    """A prompt of 100 tokens: 20 exact template text, 60 shared, 20 computed."""
    return (
        SegmentReport(kind=SegmentKind.FIXED, start=0, end=20, exact=20),
        SegmentReport(
            kind=SegmentKind.PLACEHOLDER,
            name=name,
            start=20,
            end=80,
            loaded=45,
            repaired=15,
            source=source,
            confidence=0.75,
            examples=3,
            reason="maturing edge, 3 examples",
            edge=EdgeReport(source=source, target="solver", name=name, audits=2, divergence=0.125),
        ),
        SegmentReport(kind=SegmentKind.FIXED, start=80, end=100, computed=20),
    )


@pytest.fixture
def record() -> Callable[..., RunRecord]:
    """Makes a record: ``record(agent="critic")``."""

    def make(**fields: Any) -> RunRecord:
        source = fields.pop("source", "planner")
        base: dict[str, Any] = {
            "number": 1,
            "started": 1_800_000_000.0,
            "model": "models/small",
            "agent": "solver",
            "session": "s1",
            "mode": Mode.AUTO,
            "prompt_tokens": 100,
            "completion_tokens": 12,
            "exact": 20,
            "loaded": 45,
            "repaired": 15,
            "computed": 20,
            "queue_ms": 5.0,
            "plan_ms": 1.0,
            "load_ms": 2.0,
            "repair_ms": 20.0,
            "ttft_ms": 50.0,
            "total_ms": 250.0,
            "finish_reason": "stop",
            "segments": segments(source),
        }
        return RunRecord(**(base | fields))

    return make


@pytest.fixture
def run(record: Callable[..., RunRecord]) -> list[RunRecord]:
    """Three agents with reuse, the same densely, one audit and one failure."""
    dense = {"asked": Mode.DENSE, "mode": Mode.DENSE, "tenant": "dense", "segments": (), "exact": 0, "loaded": 0}
    nothing = {"loaded": 0, "repaired": 0, "computed": 80, "mode": Mode.DENSE, "segments": ()}
    start = 1_800_000_000.0
    return [
        record(number=1, agent="planner", started=start, **nothing, reason="not seen before"),
        record(number=2, agent="solver", started=start + 0.3),
        record(number=3, agent="critic", started=start + 0.6, source="solver"),
        record(number=4, agent="solver", started=start + 1, ttft_ms=150.0, **dense),
        record(number=5, agent="critic", started=start + 1.3, session="s2", **nothing, reason="audit"),
        record(number=6, agent="critic", started=start + 1.6, session="s2", ttft_ms=None, error="EngineError"),
    ]
