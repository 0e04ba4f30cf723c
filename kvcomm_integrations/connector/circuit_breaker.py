"""The circuit breaker: after too many faults in a row reuse switches itself off for a while, and tries again later."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 3600.0
"""The pause doubles with every relapse, up to this, seconds."""


class CircuitBreaker:
    """Counts faults by where they happen (``load``, ``harvest``, ``learn``, ``audit``, ``plan``).

    Args:
        limit: consecutive faults in one place that switch reuse off; 0 never does.
        pause_s: how long it stays off the first time, seconds.
        clock: monotonic seconds.
    """

    def __init__(self, limit: int, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.total: Counter[str] = Counter()
        """Faults since the start, by place."""
        self.trips = 0
        """How often reuse has switched itself off."""
        self._first_pause = self._pause = pause_s
        self._clock = clock
        self._row: Counter[str] = Counter()
        self._until: float | None = None
        self._why = ""

    def fault(self, where: str, reason: str) -> None:
        """Note a fault."""
        self.total[where] += 1
        self._row[where] += 1
        on_trial = self._until is not None and self._clock() >= self._until
        if self.limit and not self.refusal() and (on_trial or self._row[where] >= self.limit):
            self.trips += 1
            self._why = f"too many faults in a row ({where})"
            self._until = self._clock() + self._pause
            logger.error(
                "KV reuse is off for %.0f s: %s, the last one: %s. Requests are served densely.",
                self._pause,
                self._why,
                reason,
            )
            self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    def success(self, where: str) -> None:
        """Note that something works: its row of faults is over, and so is the trial after a pause."""
        failed_here = self._row.pop(where, 0)
        if failed_here and self._until is not None and not self.refusal():
            logger.warning("KV reuse works again; it was off after %s", self._why)
            self._until, self._pause = None, self._first_pause

    def refusal(self) -> str:
        """Why nothing may be reused at present; empty if it may."""
        if self._until is None or self._clock() >= self._until:
            return ""
        return f"switched off for a while: {self._why}"

    def reset(self) -> None:
        """Try again at once, as the user asked."""
        self._row.clear()
        self._until, self._pause = None, self._first_pause
