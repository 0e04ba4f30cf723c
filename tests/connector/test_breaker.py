"""The circuit breaker: off after a row of faults, back after a pause that doubles with every relapse."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import Request

from kvcomm_integrations.connector import scheduler
from kvcomm_integrations.connector.circuit_breaker import LONGEST_PAUSE_S, CircuitBreaker
from kvcomm_integrations.connector.metadata import WorkerReport
from kvcomm_integrations.planning.entries import EntryState
from kvcomm_integrations.planning.jobs import LoadResult
from tests.connector.standins import Engine, make_half, make_request, segment


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


def test_single_faults_are_counted_and_change_nothing(time: Time) -> None:
    breaker = CircuitBreaker(3, 10.0, time)
    for _ in range(20):
        breaker.fault("load", "x")
        breaker.fault("load", "x")
        breaker.success("load")
    assert breaker.refusal() == ""
    assert breaker.total == {"load": 40}


def test_a_row_of_faults_switches_off_whatever_else_works(time: Time) -> None:
    breaker = CircuitBreaker(3, 10.0, time)
    for _ in range(3):
        breaker.success("harvest")
        breaker.fault("load", "x")
    assert "load" in breaker.refusal()
    time.now = 9.9
    assert breaker.refusal()
    time.now = 10.0
    assert breaker.refusal() == ""


def test_the_pause_doubles_until_the_seam_works_again(time: Time) -> None:
    breaker = CircuitBreaker(1, 10.0, time)
    for pause in (10.0, 20.0, 40.0):
        breaker.fault("load", "x")
        time.now += pause - 0.1
        assert breaker.refusal()
        time.now += 0.1
        assert not breaker.refusal()
        breaker.success("harvest")  # it is not what failed
    breaker.success("load")
    breaker.fault("load", "x")
    time.now += 10.0
    assert not breaker.refusal()


def test_the_pause_has_an_end(time: Time) -> None:
    breaker = CircuitBreaker(1, 3000.0, time)
    for _ in range(5):
        breaker.fault("load", "x")
        time.now += LONGEST_PAUSE_S
        assert not breaker.refusal()


def test_a_reset_tries_again_at_once(time: Time) -> None:
    breaker = CircuitBreaker(1, 10.0, time)
    breaker.fault("load", "x")
    breaker.reset()
    assert not breaker.refusal()


def test_zero_never_switches_off(time: Time) -> None:
    breaker = CircuitBreaker(0, 10.0, time)
    for _ in range(100):
        breaker.fault("load", "x")
    assert not breaker.refusal()


def test_the_reason_holds_no_text_of_the_fault(time: Time) -> None:
    """Reasons become labels of metrics: there must be few of them."""
    breaker = CircuitBreaker(1, 10.0, time)
    breaker.fault("load", "token 17 of the secret")
    assert "secret" not in breaker.refusal()


# ---- the scheduler half -----------------------------------------------------------------------------------------

CONTENT = list(range(100, 140))


def request_of(agent: str) -> Request:
    system = [{"a": 1000, "b": 2000}[agent] + i for i in range(10)]
    segments = [segment("placeholder", 10, 50, "q")]
    return make_request([*system, *CONTENT, 3000], {"agent": agent, "segments": segments, "response_name": "r"})


def boom(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a bug")


@pytest.fixture
def engine() -> Engine:
    engine = Engine(make_half(policy="aligned", max_faults=3))
    engine.run(request_of("a"), [1, 2, 3, 4, 5])
    return engine


def check_it_goes_on(engine: Engine) -> None:
    """Nothing is left of what went wrong, and the next request is served as ever."""
    engine.step()
    half = engine.half
    assert not (half._live or half._others or half._planned or half._finished)
    assert all(entry.state is EntryState.READY for entry in half.index.entries())
    assert engine.run(request_of("b"), [1])[1]["loaded"] > 0


def test_a_bug_at_arrival_costs_one_request_its_reuse(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.half.planner, "refusal", boom)
        request = request_of("b")
        engine.half.on_new_request(request)
    assert engine.admit(request) == 0
    engine.prefill(request)
    assert engine.finish(request, [1]) == (False, None)
    check_it_goes_on(engine)


@pytest.mark.parametrize("function", ["harvest_jobs", "observe_jobs", "audit_job"])
def test_a_bug_at_the_end_keeps_no_blocks(engine: Engine, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    request = make_request([*range(60)], {"segments": [segment("placeholder", 10, 50, "q")]})
    engine.half.on_new_request(request)
    engine.admit(request)
    engine.prefill(request)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, function, boom)
        assert engine.finish(request, [1]) == (False, None)
    check_it_goes_on(engine)


def test_a_bug_in_a_report_is_a_lost_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.half._reports, "_references", boom)
        engine.half.update_connector_output(WorkerReport(stored={1: 1}))
    assert engine.half.breaker.total == {"report": 1}
    check_it_goes_on(engine)


def test_three_failed_loads_in_a_row_end_in_dense_requests(engine: Engine) -> None:
    def ask(fault: str) -> dict[str, Any]:
        request = request_of("b")
        engine.half.on_new_request(request)
        engine.admit(request)
        meta = engine.prefill(request)
        engine.half.update_connector_output(
            WorkerReport(loads={job.req_id: LoadResult(1, 1, fault) for job in meta.loads})
        )
        _, out = engine.finish(request, [1])
        engine.obey(engine.step())
        return dict(out["kvcomm"])

    for _ in range(3):
        assert ask("it broke")["reason"].startswith("computed densely after a fault")
    report = ask("it broke")
    assert report["reason"] == "switched off for a while: too many faults in a row (load)"
    assert report["loaded"] == 0
    engine.half.reset_cache()
    engine.run(request_of("a"), [1, 2, 3, 4, 5])
    assert ask("")["loaded"] > 0
