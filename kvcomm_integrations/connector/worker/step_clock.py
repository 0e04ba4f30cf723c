"""How long vLLM's forwards take on this worker, measured without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

PREFILL_TOKENS = 32
"""A step of so many tokens tells of the price of a token; one of fewer tells of the price of a step."""
SMALL_STEPS = 32
"""One of so many small steps is told: they all cost about the same."""


class StepClock:
    """Times the forwards of steps; on an accelerator by events in its own stream.

    Args:
        device: where the model runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._started: Any = None
        self._pending: deque[tuple[int, Any, Any]] = deque()
        self._small = 0

    def begin(self) -> None:
        """A step's forward is about to run. The last call before it counts."""
        self._started = self._now()

    def end(self, tokens: int) -> None:
        """It has been run, or handed to the device.

        Args:
            tokens: computed in it, by vLLM and for us.
        """
        started, self._started = self._started, None
        if started is None or not tokens:
            return
        if tokens < PREFILL_TOKENS:
            self._small = (self._small + 1) % SMALL_STEPS
            if self._small != 1:
                return
        self._pending.append((tokens, started, self._now()))

    def take(self) -> tuple[int, float] | None:
        """Tokens and milliseconds of a forward that is over and has not been told yet."""
        if not self._pending or (self._events and not self._pending[0][2].query()):
            return None
        tokens, started, ended = self._pending.popleft()
        return tokens, started.elapsed_time(ended) if self._events else (ended - started) * 1e3

    def _now(self) -> Any:
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
