"""Numbers for operators: complete, bounded, and the same as what clients are told."""

from __future__ import annotations

import json
import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvcomm_integrations.connector import metrics as series
from kvcomm_integrations.connector.connector import KVCommConnector
from kvcomm_integrations.connector.metadata import WorkerReport
from kvcomm_integrations.connector.meter import CHANGES, WATCHED, TopLabels
from kvcomm_integrations.connector.metrics import KEPT, Kind, ReuseStats, Series, series_key
from kvcomm_integrations.planning.jobs import AuditResult, LoadResult
from kvcomm_integrations.reuse.edge import Edge

from .standins import Engine, make_half, make_request, segment

PROMPT = list(range(100, 164))
QUESTION = list(range(501, 532))


class Exported:
    """A Prometheus registry that stands behind the connector as vLLM's logger puts it there."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        types: Any = {metric: partial(metric, registry=self.registry) for metric in (Counter, Gauge, Histogram)}
        config: Any = SimpleNamespace(kv_transfer_config=None)
        metrics = KVCommConnector.build_prom_metrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
        assert metrics is not None
        self.metrics = metrics

    def take(self, stats: ReuseStats | None) -> None:
        """Send an interval through vLLM's serialisation and record it."""
        if stats is not None:
            self.metrics.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict())))

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels}) or 0.0


def ask(engine: Engine, agent: str, start: int, *, mode: str = "auto", first: int = 500) -> dict[str, Any]:
    """A prompt of 16 + 32 + 16 tokens whose middle all agents share."""
    prompt = [start + token for token in range(16)] + [first, *QUESTION] + [start + token for token in range(16, 32)]
    params = {"agent": agent, "mode": mode, "segments": [segment("placeholder", 16, 48, "user_question")]}
    return engine.run(make_request(prompt, params), [7] * 6)[1]


def test_counters_are_the_sum_of_what_clients_are_told() -> None:
    half, exported = make_half(), Exported()
    engine = Engine(half)
    reports = []
    for number, agent in enumerate(("planner", "solver", "critic", "solver")):
        reports.append(ask(engine, agent, 1000 * (number + 1)))
        exported.take(half.meter.take())
    reports.append(ask(engine, "writer", 9000, mode="dense"))
    exported.take(half.meter.take())
    assert sum(report["loaded"] for report in reports) > 0
    for treatment in ("exact", "loaded", "repaired", "computed"):
        total = sum(report[treatment] for report in reports)
        assert exported.value("vllm:kvcomm_prompt_tokens_total", treatment=treatment) == total
        solver = sum(report[treatment] for report in reports if report["agent"] == "solver")
        labels = {"agent": "solver", "treatment": treatment}
        assert exported.value("vllm:kvcomm_agent_tokens_total", **labels) == solver
    edge = {"source": "planner", "target": "solver", "placeholder": "user_question", "treatment": "loaded"}
    loaded = sum(report["loaded"] for report in reports if report["agent"] == "solver")
    assert exported.value("vllm:kvcomm_edge_tokens_total", **edge) == loaded > 0
    reused = sum(report["loaded"] > 0 for report in reports)
    assert exported.value("vllm:kvcomm_requests_total", outcome="reused") == reused
    assert exported.value("vllm:kvcomm_requests_total", outcome="dense") == len(reports) - reused
    assert exported.value("vllm:kvcomm_load_seconds_count") == reused
    assert exported.value("vllm:kvcomm_load_seconds_sum") == pytest.approx(reused * 1e-3)
    assert exported.value("vllm:kvcomm_references") == len(half.index)


def test_a_request_that_was_never_computed_counts_no_tokens() -> None:
    half, exported = make_half(), Exported()
    request = make_request(PROMPT, {"agent": "a", "segments": [segment("placeholder", 16, 48, "q")]})
    half.on_new_request(request)
    half.request_finished(request, [])
    exported.take(half.meter.take())
    assert exported.value("vllm:kvcomm_requests_total", outcome="aborted") == 1
    assert exported.value("vllm:kvcomm_prompt_tokens_total", treatment="computed") == 0
    assert half.meter.take() is None


def test_audits_faults_evictions_and_edges() -> None:
    half, exported = make_half(store_bytes=64 * 128), Exported()
    engine = Engine(half)
    edge = Edge("planner", "solver", "q")

    def audited(policy: str, kl: float) -> AuditResult:
        return AuditResult("r", policy, (edge,), (kl,), (True,), 64, 0, 32, 8)

    half.update_connector_output(
        WorkerReport(
            failed={99: "no room"},
            loads={"r": LoadResult(1.0, 1.0, "KeyError: gone"), "s": LoadResult(1.0, 1.0)},
            examples={("ridge", edge): 3, ("ridge", edge._replace(target="c")): 1, ("ridge", Edge("x", "y", "z")): 0},
            audits=[audited("ridge", 0.02), audited("ridge", 0.2), audited("kvcomm", 2.0)],
        )
    )
    half.on_new_request(make_request(PROMPT, {"segments": [segment("placeholder", 3, 99, "q")]}))
    for number in range(6):
        ask(engine, f"a{number}", 1000 * (number + 1), first=number)
    exported.take(half.meter.take())
    value = exported.value
    for where in ("harvest", "load", "request"):
        assert value("vllm:kvcomm_faults_total", where=where) == 1
    assert value("vllm:kvcomm_audits_total", policy="ridge") == 2
    assert value("vllm:kvcomm_audits_total", policy="kvcomm") == 1
    assert value("vllm:kvcomm_audit_divergence_nats_count") == 2
    assert value("vllm:kvcomm_audit_divergence_nats_bucket", le="0.03") == 1
    assert value("vllm:kvcomm_evictions_total") == half.index.evictions > 0
    assert value("vllm:kvcomm_edges", verdict="open") == 3  # two that have learned, one that was only audited
    assert value("vllm:kvcomm_edges", verdict="closed") == 0
    assert value("vllm:kvcomm_paused") == value("vllm:kvcomm_breaker_trips_total") == 0
    for _ in range(half.config.max_faults):
        half.breaker.fault("learn", "no luck")
    exported.take(half.meter.take())
    assert value("vllm:kvcomm_faults_total", where="learn") == half.config.max_faults
    assert value("vllm:kvcomm_paused") == value("vllm:kvcomm_breaker_trips_total") == 1


def test_made_up_names_share_one_series() -> None:
    half = make_half(metric_labels=2)
    engine = Engine(half)
    exported = Exported()
    for number in range(9):
        ask(engine, f"agent {number}", 1000 * (number + 1))
        exported.take(half.meter.take())
    names = {
        sample.labels["agent"]
        for metric in exported.registry.collect()
        for sample in metric.samples
        if sample.name == "vllm:kvcomm_agent_tokens_total"
    }
    assert names == {"agent 0", "agent 1", "other"}
    total = sum(exported.value("vllm:kvcomm_prompt_tokens_total", treatment=t) for t in ("loaded", "computed"))
    assert total > 0


@settings(max_examples=50, deadline=None)
@given(uses=st.lists(st.integers(0, 200), max_size=400), limit=st.integers(0, 5))
def test_own_series_stay_bounded(uses: list[int], limit: int) -> None:
    top: TopLabels[int] = TopLabels(limit)
    ever = {name for name in uses if top.use(name)}
    assert len(ever) <= (1 + CHANGES) * limit
    assert len(top._uses) <= WATCHED * limit


def test_the_most_used_get_their_own_in_the_end() -> None:
    top: TopLabels[str] = TopLabels(2)
    for number in range(50):
        top.use(f"junk {number}")
    for _ in range(60):
        kept = [top.use("solver"), top.use("critic")]
    assert kept == [True, True]
    assert not top.use("junk 51")


def test_intervals_and_ranks_add_up() -> None:
    first, second = ReuseStats(), ReuseStats()
    for rank, stats in enumerate((first, second)):
        stats.count(series.PROMPT_TOKENS, 5, "loaded")
        stats.observe(series.LOAD_SECONDS, 0.5)
        stats.gauge(series.STORE_BYTES, 100 + rank, str(rank))
    joined = first.aggregate(pickle.loads(pickle.dumps(second)))
    assert joined.data[Kind.COUNTER] == {series_key(series.PROMPT_TOKENS, "loaded"): 10}
    assert joined.data[Kind.HISTOGRAM] == {series_key(series.LOAD_SECONDS): [0.5, 0.5]}
    assert len(joined.data[Kind.GAUGE]) == 2
    short = joined.reduce()
    assert (short["loaded tokens"], short["mean load ms"]) == (10, 500.0)
    rebuilt = KVCommConnector.build_kv_connector_stats(json.loads(json.dumps(joined.to_dict())))
    assert rebuilt is not None
    assert rebuilt.reduce() == short
    joined.reset()
    assert joined.is_empty()


def test_observations_nobody_reads_do_not_grow() -> None:
    stats = ReuseStats()
    for number in range(3):
        other = ReuseStats()
        for value in range(KEPT):
            other.observe(series.PLAN_SECONDS, float(value + number))
        stats.aggregate(other)
    [kept] = stats.data[Kind.HISTOGRAM].values()
    assert len(kept) == KEPT


def test_every_series_is_named_once_and_explained() -> None:
    assert len(series.BY_NAME) == len(series.ALL)
    defined = {value for value in vars(series).values() if isinstance(value, Series)}
    assert defined == set(series.ALL)
    for one in series.ALL:
        assert one.name.startswith("vllm:kvcomm_")
        assert one.documentation.endswith(".")
        assert bool(one.buckets) == (one.kind is Kind.HISTOGRAM)
