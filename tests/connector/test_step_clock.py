"""Forwards are timed by step: large ones always, small ones now and then."""

from __future__ import annotations

import torch

from kvcomm_integrations.connector.worker.step_clock import PREFILL_TOKENS, SMALL_STEPS, StepClock


def timed(clock: StepClock, tokens: int) -> tuple[int, float] | None:
    clock.begin()
    clock.end(tokens)
    return clock.take()


def test_a_large_step_is_told_once() -> None:
    clock = StepClock(torch.device("cpu"))
    told = timed(clock, PREFILL_TOKENS)
    assert told is not None
    assert told[0] == PREFILL_TOKENS and told[1] >= 0
    assert clock.take() is None


def test_of_small_steps_one_of_many_is_told() -> None:
    clock = StepClock(torch.device("cpu"))
    assert sum(timed(clock, 1) is not None for _ in range(3 * SMALL_STEPS)) == 3


def test_a_step_without_a_forward_or_a_beginning_is_not_timed() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.end(100)
    clock.begin()
    clock.end(0)
    clock.end(100)
    assert clock.take() is None


class Event:
    """Stands in for an event of a CUDA stream."""

    ready = False
    recorded = 0

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self) -> None:
        Event.recorded += 1

    def query(self) -> bool:
        return Event.ready

    def elapsed_time(self, later: Event) -> float:
        return 7.0


def test_on_an_accelerator_nobody_waits(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StepClock(torch.device("cuda"))
    assert timed(clock, 100) is None
    assert Event.recorded == 2
    Event.ready = True
    assert clock.take() == (100, 7.0)
