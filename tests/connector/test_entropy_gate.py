"""The papers' gate, end to end in the scheduler half: what it does not predict runs densely and becomes an anchor."""

from __future__ import annotations

from typing import Any

import pytest

from kvcomm_integrations.connector.metadata import WorkerReport
from kvcomm_integrations.reuse.edge import Edge
from tests.connector.standins import Engine, make_half, make_request, segment
from tests.connector.test_scheduler import ask, other


def report_entropy(engine: Engine, policy: str, target: str, entropy: float, anchors: int = 4) -> None:
    """What workers report: anchors of all edges to an agent, and the entropy of each content held."""
    found = WorkerReport()
    for entry in engine.half.index.entries():
        edge = Edge(entry.source, target, entry.reserved.name, '["", "default"]')
        found.examples[(policy, edge)] = anchors
        found.leverage[(policy, edge, entry.ref_id)] = entropy
    engine.half.update_connector_output(found)


def dense_and_learning(engine: Engine, request: Any) -> tuple[dict[str, Any], int]:
    """Run a request; its report and the number of contents it teaches."""
    engine.half.on_new_request(request)
    engine.admit(request)
    engine.prefill(request)
    meta = engine.step()
    _, out = engine.finish(request, [1])
    return out["kvcomm"], len([job for job in meta.observes if job.edge.name == "user_question"])


@pytest.mark.parametrize("policy", ["kvcomm", "kvcmas"])
@pytest.mark.parametrize(("entropy", "loads"), [(0.4, True), (1.0, True), (1.01, False)])
def test_only_predictable_contents_are_loaded(policy: str, entropy: float, loads: bool) -> None:
    engine = Engine(make_half(policy=policy, gate="entropy"))
    engine.run(ask(), [1])
    report_entropy(engine, policy, "a1000", entropy)
    report, lessons = dense_and_learning(engine, ask(other(1)))
    (content,) = [s for s in report["segments"] if s["name"]]
    assert f"entropy {entropy:.2f} of the threshold over 4 anchors" in content["reason"]
    assert lessons == (0 if loads else 1)
    assert ("user_question: entropy gate" in report["reason"]) is not loads


def test_without_anchors_everything_is_dense_and_becomes_one() -> None:
    engine = Engine(make_half(policy="kvcomm", gate="entropy"))
    engine.run(ask(), [1])
    report, lessons = dense_and_learning(engine, ask(other(1)))
    assert report["reason"] == "user_question: entropy gate: 0 anchors cannot predict it"
    assert (report["mode"], lessons) == ("dense", 1)


def test_one_unpredictable_content_makes_the_whole_request_dense() -> None:
    engine = Engine(make_half(policy="kvcomm", gate="entropy"))
    engine.run(ask(), [1])
    fresh = list(range(700, 750))
    engine.run(ask(other(3), fresh), [1])
    known = list(range(100, 150))
    prompt = [*other(1), *known, 5, *fresh, 7, 8, 9]
    segments = [segment("placeholder", 9, 59, "user_question"), segment("placeholder", 60, 110, "user_question")]
    for entropy in (2.0, 0.1):
        found = WorkerReport()
        for entry in engine.half.index.entries():
            edge = Edge(entry.source, "b", entry.reserved.name, '["", "default"]')
            found.examples[("kvcomm", edge)] = 3
            found.leverage[("kvcomm", edge, entry.ref_id)] = entropy if entry.source == "a3000" else 0.1
        engine.half.update_connector_output(found)
        report, lessons = dense_and_learning(engine, make_request(prompt, {"segments": segments, "agent": "b"}))
        assert lessons == (2 if entropy > 1 else 0)
        assert bool(report["reason"]) is (entropy > 1)


def test_other_policies_keep_to_maturity() -> None:
    engine = Engine(make_half(policy="ridge", gate="entropy"))
    engine.run(ask(), [1])
    _, report = engine.run(ask(other(1)), [1])
    assert report["loaded"] > 0 and report["segments"][1]["reason"] == "edge without examples"


def test_an_unpredictable_request_is_not_audited() -> None:
    engine = Engine(make_half(policy="kvcomm", gate="entropy"))
    engine.run(ask(), [1])
    request = ask(other(1), mode="observe", audit=["kvcomm", "ridge"])
    engine.half.on_new_request(request)
    engine.admit(request)
    engine.prefill(request)
    engine.finish(request, [1, 2])
    (job,) = engine.step().audits
    assert [variant.policy for variant in job.variants] == ["ridge"]
