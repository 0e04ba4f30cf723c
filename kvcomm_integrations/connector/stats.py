"""What happened in one interval, as plain numbers that travel from workers and scheduler to whoever exports them.

vLLM collects it every step: the workers' part is aggregated over ranks, then with the scheduler's, and sent to the
front end with the step's outputs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvcomm_integrations.connector.compat import KVConnectorStats
from kvcomm_integrations.connector.series import (
    AUDITS,
    BY_NAME,
    EVICTIONS,
    FAULTS,
    LOAD_SECONDS,
    PROMPT_TOKENS,
    REPAIR_SECONDS,
    Kind,
    Series,
)

KEPT = 4096
"""Observations of one histogram kept in one interval; beyond it the oldest go, so that nothing grows unread."""


def series_key(series: Series, *labels: str) -> str:
    """A series with values for its labels, as a JSON list: vLLM sends the numbers as plain data."""
    assert len(labels) == len(series.labels), f"{series.name} has the labels {series.labels}, not {labels}"
    return json.dumps([series.name, *labels])


def parse_key(key: str) -> tuple[Series, tuple[str, ...]]:
    """The reverse of ``series_key``."""
    name, *labels = json.loads(key)
    return BY_NAME[name], tuple(labels)


@dataclass
class ReuseStats(KVConnectorStats):
    """Counters, gauges and observations by ``series_key``.

    Aggregation adds counters, joins observations and lets the later gauge win; a gauge that every rank has carries the
    rank as a label.
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {Kind.COUNTER: {}, Kind.GAUGE: {}, Kind.HISTOGRAM: {}}

    def count(self, series: Series, amount: float, *labels: str) -> None:
        """Add to a counter."""
        if amount:
            counters, key = self.data[Kind.COUNTER], series_key(series, *labels)
            counters[key] = counters.get(key, 0) + amount

    def gauge(self, series: Series, value: float, *labels: str) -> None:
        """Set a gauge."""
        self.data[Kind.GAUGE][series_key(series, *labels)] = value

    def observe(self, series: Series, value: float) -> None:
        """Add an observation to a histogram."""
        self._extend(series_key(series), [value])

    def aggregate(self, other: KVConnectorStats) -> ReuseStats:
        """Join with another rank's, the scheduler's or a later interval's numbers."""
        counters = self.data[Kind.COUNTER]
        for key, amount in other.data[Kind.COUNTER].items():
            counters[key] = counters.get(key, 0) + amount
        self.data[Kind.GAUGE].update(other.data[Kind.GAUGE])
        for key, values in other.data[Kind.HISTOGRAM].items():
            self._extend(key, values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The interval in a few numbers, for vLLM's log line."""
        short: dict[str, int | float] = {}
        for treatment in ("exact", "loaded", "repaired", "computed"):
            short[f"{treatment} tokens"] = self._counted(PROMPT_TOKENS, treatment)
        for name, series in (("load", LOAD_SECONDS), ("repair", REPAIR_SECONDS)):
            seen = self.data[Kind.HISTOGRAM].get(series_key(series), [])
            if seen:
                short[f"mean {name} ms"] = round(1e3 * sum(seen) / len(seen), 2)
        for name, series in (("audits", AUDITS), ("evictions", EVICTIONS), ("faults", FAULTS)):
            if total := self._counted(series):
                short[name] = total
        return short

    def is_empty(self) -> bool:
        """Nothing happened."""
        return not any(self.data.values())

    def _counted(self, series: Series, *labels: str) -> float:
        """Sum of a counter over all labels that begin with ``labels``."""
        total = 0.0
        for key, amount in self.data[Kind.COUNTER].items():
            name, *values = json.loads(key)
            if name == series.name and tuple(values[: len(labels)]) == labels:
                total += amount
        return total

    def _extend(self, key: str, values: list[float]) -> None:
        seen = self.data[Kind.HISTOGRAM].setdefault(key, [])
        seen.extend(values)
        del seen[:-KEPT]
