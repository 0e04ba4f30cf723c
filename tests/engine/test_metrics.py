"""What the engine's process exports is what its clients were told: its own registry, or a server's ``/metrics``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.connector.metrics import ALL
from kvcomm_integrations.wire import Mode, RequestReport
from tests.engine.helpers import END, QUESTIONS, Client, system
from tests.engine.served import BOTH_AT_LENGTH, ServedEngine, running, samples

pytestmark = pytest.mark.engine

ROLES = {"planner": Mode.AUTO, "solver": Mode.OBSERVE, "critic": Mode.AUTO, "writer": Mode.DENSE}


@pytest.fixture(scope="module", params=BOTH_AT_LENGTH)
def measured(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    reuse = ReuseConfig(only_if_faster=False, idle_budget=0, min_segment_tokens=1, metric_labels=3, store_bytes=1 << 20)
    config = EngineConfig(
        dtype="float32", model=str(tiny_model), max_model_len=512, kv_cache_bytes=64 << 20, reuse=reuse
    )
    with running(request.param, config, tmp_path_factory.mktemp("measured")) as engine:
        yield Client(engine)


def value(client: Client, name: str, **labels: str) -> float:
    wanted = {"model_name": client.engine.config.model, "engine": "0", **labels}
    if not isinstance(client.engine, ServedEngine):
        return REGISTRY.get_sample_value(name, wanted) or 0.0
    return sum(s.value for s in samples(client.engine.root) if s.name == name and s.labels == wanted)


def test_the_registry_has_the_sum_of_all_reports(measured: Client) -> None:
    reports: list[RequestReport] = []
    for number, lesson in enumerate(QUESTIONS * 2):
        question = ("user_question", measured.encode(f"{lesson} This is case {number}."))
        for role, mode in ROLES.items():
            request = measured.request(
                measured.prompt(system(role), question, END), agent=role, session=f"m{number}", mode=mode, tokens=2
            )
            if mode is Mode.OBSERVE:
                request = replace(request, params=request.params.model_copy(update={"audit": ("ridge",)}))
            reports.append(measured.run(request).report)
    measured.engine.drain()
    for treatment in ("exact", "loaded", "repaired", "computed"):
        total = sum(getattr(report, treatment) for report in reports)
        assert value(measured, "vllm:kvcomm_prompt_tokens_total", treatment=treatment) == total > 0
        of_critic = sum(getattr(report, treatment) for report in reports if report.agent == "critic")
        labels = {"agent": "critic", "treatment": treatment}
        assert value(measured, "vllm:kvcomm_agent_tokens_total", **labels) == of_critic
    reused = [report for report in reports if report.mode is Mode.AUTO]
    assert value(measured, "vllm:kvcomm_requests_total", outcome="reused") == len(reused) > 0
    assert value(measured, "vllm:kvcomm_requests_total", outcome="observe") == len(QUESTIONS * 2)
    for part in ("load", "repair"):
        told = sum(getattr(report, f"{part}_ms") for report in reused) / 1e3
        assert value(measured, f"vllm:kvcomm_{part}_seconds_sum") == pytest.approx(told, abs=1e-4)
        assert value(measured, f"vllm:kvcomm_{part}_seconds_count") == len(reused)
    [worker] = measured.engine.call_workers("kvcomm_stats")
    assert value(measured, "vllm:kvcomm_store_bytes", rank="0") == worker["store_bytes"] > 0
    assert value(measured, "vllm:kvcomm_state_bytes", rank="0") == sum(worker["policies"].values()) > 0
    assert value(measured, "vllm:kvcomm_audits_total", policy="ridge") >= 1
    assert value(measured, "vllm:kvcomm_evictions_total") > 0
    assert value(measured, "vllm:kvcomm_edges", verdict="open") >= 1


def test_every_series_is_registered(measured: Client) -> None:
    """Those without labels of their own are shown as 0 before anything has happened."""
    if isinstance(measured.engine, ServedEngine):
        exported = {sample.name for sample in samples(measured.engine.root)}
        plain = [series for series in ALL if not series.labels]
        assert {name for series in plain for name in series.exported} <= exported
    else:
        assert {series.name for series in ALL} <= {metric.name for metric in REGISTRY.collect()}
