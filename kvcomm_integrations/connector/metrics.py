"""What happened in one interval, as plain numbers that travel from workers and scheduler to whoever exports them.

vLLM collects it every step: the workers' part is aggregated over ranks, then with the scheduler's, and sent to the
front end with the step's outputs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvcomm_integrations.connector.compat import KVConnectorPromMetrics, KVConnectorStats, VllmConfig
from kvcomm_integrations.wire import TREATMENTS

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
NATS = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Kind(StrEnum):
    """What a series is in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Series:
    """One metric with its own labels."""

    name: str
    kind: Kind
    documentation: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exported(self) -> tuple[str, ...]:
        """Names under which Prometheus sees it."""
        if self.kind is Kind.COUNTER:
            return (f"{self.name}_total",)
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


PROMPT_TOKENS = Series(
    "vllm:kvcomm_prompt_tokens",
    Kind.COUNTER,
    "Prompt tokens of requests with kvcomm parameters, by what was done with them.",
    ("treatment",),
)
AGENT_TOKENS = Series(
    "vllm:kvcomm_agent_tokens",
    Kind.COUNTER,
    "Prompt tokens by agent; agents beyond the most used ones are 'other'.",
    ("agent", "treatment"),
)
EDGE_TOKENS = Series(
    "vllm:kvcomm_edge_tokens",
    Kind.COUNTER,
    "Tokens of shared contents that were loaded over an edge; edges beyond the most used ones are 'other'.",
    ("source", "target", "placeholder", "treatment"),
)
REQUESTS = Series(
    "vllm:kvcomm_requests",
    Kind.COUNTER,
    "Requests with kvcomm parameters: reused, dense, observe, or aborted before the prompt was complete.",
    ("outcome",),
)
PLAN_SECONDS = Series(
    "vllm:kvcomm_plan_seconds", Kind.HISTOGRAM, "Time the scheduler took for a request's plan.", (), SECONDS
)
LOAD_SECONDS = Series(
    "vllm:kvcomm_load_seconds",
    Kind.HISTOGRAM,
    "Time the references of a request's step took to be corrected, rotated and written (slowest rank).",
    (),
    SECONDS,
)
REPAIR_SECONDS = Series(
    "vllm:kvcomm_repair_seconds",
    Kind.HISTOGRAM,
    "Time of the repair pass of a request's step, or its share, by tokens, of the forward that it joined; requests of "
    "one step share one pass.",
    (),
    SECONDS,
)
STORE_BYTES = Series("vllm:kvcomm_store_bytes", Kind.GAUGE, "Bytes of references on a worker.", ("rank",))
STATE_BYTES = Series("vllm:kvcomm_state_bytes", Kind.GAUGE, "Bytes of learned corrections on a worker.", ("rank",))
REFERENCES = Series("vllm:kvcomm_references", Kind.GAUGE, "References held or reserved.")
EDGES = Series(
    "vllm:kvcomm_edges",
    Kind.GAUGE,
    "Edges by what audits have made of them: proven, open, deeper, closed.",
    ("verdict",),
)
AUDITS = Series("vllm:kvcomm_audits", Kind.COUNTER, "Audits that were carried out.", ("policy",))
AUDIT_DIVERGENCE = Series(
    "vllm:kvcomm_audit_divergence_nats",
    Kind.HISTOGRAM,
    "KL divergence of the first answer token under reuse from the dense run, in audits of the engine's policy.",
    (),
    NATS,
)
SHADOW_REQUESTS = Series(
    "vllm:kvcomm_shadow_requests",
    Kind.COUNTER,
    "Requests computed again while nobody waited: done, or interrupted by a user's request (and tried again).",
    ("outcome",),
)
SHADOW_TOKENS = Series("vllm:kvcomm_shadow_tokens", Kind.COUNTER, "Tokens that these have computed.")
SHADOW_WAITING = Series("vllm:kvcomm_shadow_waiting", Kind.GAUGE, "Requests that wait to be computed again.")
SHADOW_DELAY = Series(
    "vllm:kvcomm_shadow_delay_seconds",
    Kind.HISTOGRAM,
    "Time a user's request that met one has waited for the engine to take it in.",
    (),
    SECONDS,
)
EVICTIONS = Series("vllm:kvcomm_evictions", Kind.COUNTER, "References evicted to make room.")
FAULTS = Series(
    "vllm:kvcomm_faults",
    Kind.COUNTER,
    "Faults, all of which end in dense computation: request (its parameters), plan, load, harvest, learn, audit.",
    ("where",),
)
TRIPS = Series("vllm:kvcomm_breaker_trips", Kind.COUNTER, "Times that faults in a row switched reuse off for a while.")
PAUSED = Series(
    "vllm:kvcomm_paused", Kind.GAUGE, "1 while reuse is switched off after faults, as of the latest request."
)

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Series))
"""Every series above."""
BY_NAME = {series.name: series for series in ALL}

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
        for treatment in TREATMENTS:
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


class ReusePromMetrics(KVConnectorPromMetrics):
    """Registers every series and records what arrives.

    Args:
        vllm_config: the engine's configuration.
        metric_types: vLLM's classes for Prometheus' gauges, counters and histograms.
        labelnames: labels that all of vLLM's series have.
        per_engine_labelvalues: their values, by engine.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {series.name: self._register(series) for series in ALL}
        for series in ALL:
            if not series.labels:  # shown as 0 from the start: a rate would miss a first step from nothing to 1
                for values in per_engine_labelvalues.values():
                    self._metrics[series.name].labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval of ``ReuseStats`` data."""
        for key, amount in transfer_stats_data[Kind.COUNTER].items():
            self._child(key, engine_idx).inc(amount)
        for key, value in transfer_stats_data[Kind.GAUGE].items():
            self._child(key, engine_idx).set(value)
        for key, values in transfer_stats_data[Kind.HISTOGRAM].items():
            child = self._child(key, engine_idx)
            for value in values:
                child.observe(value)

    def _register(self, series: Series) -> Any:
        more: dict[str, Any] = {}
        if series.kind is Kind.HISTOGRAM:
            more["buckets"] = series.buckets
        elif series.kind is Kind.GAUGE:
            more["multiprocess_mode"] = "mostrecent"
        make = {
            Kind.COUNTER: self._counter_cls,
            Kind.GAUGE: self._gauge_cls,
            Kind.HISTOGRAM: self._histogram_cls,
        }[series.kind]
        return make(
            name=series.name,
            documentation=series.documentation,
            labelnames=[*self._labelnames, *series.labels],
            **more,
        )

    def _child(self, key: str, engine: int) -> Any:
        series, labels = parse_key(key)
        return self._metrics[series.name].labels(*self.per_engine_labelvalues[engine], *labels)
