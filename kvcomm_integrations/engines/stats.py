"""What vLLM's scheduler says of its blocks and requests after each step, kept as the latest snapshot."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SchedulerSnapshot:
    """vLLM's own counters after its latest step."""

    usage: float = 0.0
    """Share of the paged cache's blocks held by requests."""
    running: int = 0
    waiting: int = 0


class StatsKeeper:
    """Receives vLLM's statistics and keeps the latest; ``factory`` goes into ``stat_loggers``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest = SchedulerSnapshot()

    @property
    def latest(self) -> SchedulerSnapshot:
        """The snapshot after the latest step; all zero before the first."""
        with self._lock:
            return self._latest

    def note(self, stats: Any) -> None:
        """Take in vLLM's ``SchedulerStats``."""
        with self._lock:
            self._latest = SchedulerSnapshot(stats.kv_cache_usage, stats.num_running_reqs, stats.num_waiting_reqs)

    def factory(self, vllm_config: Any, engine_index: int = 0) -> Any:
        """A vLLM statistics logger that reports here."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        keeper = self

        class Logger(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                del vllm_config, engine_index

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
            ) -> None:
                if scheduler_stats is not None:
                    keeper.note(scheduler_stats)

            def log_engine_initialized(self) -> None:
                """Nothing to say."""

        return Logger(vllm_config, engine_index)
