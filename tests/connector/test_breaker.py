"""The circuit breaker: off after a row of faults, back after a pause that doubles with every relapse."""

from __future__ import annotations

import pytest

from kvcomm_integrations.connector.breaker import LONGEST_PAUSE_S, CircuitBreaker


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
