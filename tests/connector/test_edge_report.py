"""What a report says of each content's edge: examples, audits, and whether it is open."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvcomm_integrations.connector.metadata import WorkerReport
from kvcomm_integrations.planning.jobs import AuditResult
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.wire import RequestReport, SegmentReport
from tests.connector.standins import Engine, make_half
from tests.connector.test_scheduler import QUESTION, ask, other

EDGE = Edge("a1", "a1000", "user_question", '["", "default"]')


def audited(engine: Engine, *divergences: float, examples: int = 5) -> SegmentReport:
    """The report of a content on an edge with these audits."""
    for kl in divergences:
        audit = AuditResult("r", "ridge", (EDGE,), (kl,), (True,), 60, 0, 40, 10)
        engine.half.update_connector_output(WorkerReport(examples={("ridge", EDGE): examples}, audits=[audit]))
        ask_again(engine)  # verdicts are given when somebody asks
    return ask_again(engine)


def ask_again(engine: Engine) -> SegmentReport:
    _, out = engine.run(ask(other(1)), [1])
    report = RequestReport.model_validate(out)
    (content,) = [s for s in report.segments if s.name]
    return content


def engine_with_a_content(**options: Any) -> Engine:
    engine = Engine(make_half(**options))
    engine.run(ask(), [1])
    return engine


def test_an_edge_without_audits_says_so() -> None:
    content = audited(engine_with_a_content())
    assert content.edge is not None
    assert (content.edge.source, content.edge.target, content.edge.name) == ("a1", "a1000", "user_question")
    assert (content.edge.health, content.edge.why, content.edge.audits) == ("open", "no audits yet", 0)
    assert content.edge.divergence is content.edge.divergence_low is content.edge.divergence_high is None
    assert content.edge.reference == "first dense consumer"
    assert (content.source, content.examples) == ("a1", 0)


def test_the_last_divergence_and_its_bounds_are_reported() -> None:
    content = audited(engine_with_a_content(), 0.01, 0.03)
    assert content.edge is not None and content.examples == 5
    assert (content.edge.health, content.edge.audits, content.edge.divergence) == ("open", 2, 0.03)
    assert content.edge.divergence_low is not None and content.edge.divergence_high is not None
    assert content.edge.divergence_low < 0.02 < content.edge.divergence_high
    assert "2 audits" in content.edge.why


def test_an_edge_repairs_deeper_then_closes_and_says_why() -> None:
    engine = engine_with_a_content(max_divergence=0.1)
    content = audited(engine, 2.0, 2.1, 1.9)
    assert content.edge is not None and content.edge.health == "deeper" and content.loaded
    assert "limit 0.1" in content.edge.why
    content = audited(engine, 2.0, 2.1, 1.9)
    assert content.edge is not None and content.edge.health == "closed" and not content.loaded
    assert "limit 0.1" in content.edge.why and "more than 0.1 nats" in content.reason
    assert (content.edge.divergence, content.computed) == (1.9, len(QUESTION))
    content = audited(engine, 0.0, examples=50)
    assert content.edge is not None and content.edge.health == "deeper" and "fresh examples" in content.edge.why


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_stays_out_of_the_report(broken: float) -> None:
    """It travels as JSON, which has no infinity."""
    content = audited(engine_with_a_content(), broken)
    assert content.edge is not None and content.edge.health == "deeper"
    assert content.edge.divergence is None
    assert "Infinity" not in content.model_dump_json()
