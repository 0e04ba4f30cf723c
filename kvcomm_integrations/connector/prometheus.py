"""Exports our numbers through vLLM's Prometheus logger, in the process that serves ``/metrics``."""

from __future__ import annotations

from typing import Any

from kvcomm_integrations.connector.compat import KVConnectorPromMetrics, VllmConfig
from kvcomm_integrations.connector.series import ALL, Kind, Series
from kvcomm_integrations.connector.stats import parse_key


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
