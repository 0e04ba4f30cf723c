"""Other weights, other keys and values: what came from the old ones is forgotten by both halves, by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcomm_integrations.connector.metadata import StepMetadata, WorkerReport
from kvcomm_integrations.connector.workarounds import watch_weights
from kvcomm_integrations.connector.worker.state_rpc import StateRpc
from kvcomm_integrations.connector.worker.worker import ConnectorWorker
from kvcomm_integrations.planning.jobs import HarvestJob, ObserveJob
from tests.connector.standins import Engine, make_half, make_request, segment
from tests.connector.test_worker import EDGE, _fill, _harvest, _worker


class Runner:
    """What matters of vLLM's model runner."""

    def __init__(self) -> None:
        self.loaded = 0

    def reload_weights(self, weights_iterator: Any = None, weights_path: str | None = None) -> int:
        if weights_path == "nowhere":
            raise FileNotFoundError(weights_path)
        self.loaded += 1
        self.reset_lora_state()
        return self.loaded

    def reset_lora_state(self) -> None:
        """Adapters wrap the old weights."""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda runner: runner.reload_weights(), True),
        (lambda runner: runner.reload_weights(weights_path="b"), True),
        (lambda runner: runner.reload_weights(weights_iterator=iter(())), False),
        (lambda runner: runner.reload_weights(None, "b"), True),
        (lambda runner: runner.reload_weights(iter(())), False),
        (lambda runner: runner.reset_lora_state(), False),  # as at the end of a transfer from a trainer
    ],
)
def test_every_way_of_replacing_weights_is_noticed(change: Callable[[Runner], Any], named: bool) -> None:
    seen: list[bool] = []
    runner = Runner()
    watch_weights(runner, seen.append)
    assert change(runner) in (1, None)
    assert seen[-1] is named


def test_half_a_reload_is_one_too() -> None:
    seen: list[bool] = []
    runner = Runner()
    watch_weights(runner, seen.append)
    with pytest.raises(FileNotFoundError):
        runner.reload_weights(weights_path="nowhere")
    assert seen == [False]
    watch_weights(object(), seen.append)  # a runner that cannot replace its weights
    assert seen == [False]


@pytest.fixture
def half() -> ConnectorWorker:
    """A worker that holds a reference and has learned from it."""
    half = _worker()
    _fill(half, (0, 1, 2), 40, seed=3)
    _harvest(half, 7, (0, 1, 2), 0, 40)
    _fill(half, (3, 4), 32, seed=4)
    half.save(StepMetadata(observes=[ObserveJob("ridge", EDGE, 7, 0, (3, 4), 0, 30)]))
    half.take_report()
    return half


def test_a_worker_forgets_what_it_held_and_learned(half: ConnectorWorker) -> None:
    runner = Runner()
    half.attach(runner)
    runner.reload_weights()
    assert (len(half.store), half.store.nbytes, half.learner.policies["ridge"].edges()) == (0, 0, ())
    report = half.take_report()
    assert report is not None
    assert (report.weights, report.examples) == (half.weights, {("ridge", EDGE): 0})
    assert half.learner.background.wait(10) and not half.learner.leverages._known


def test_orders_given_before_the_scheduler_half_knew_are_not_obeyed(half: ConnectorWorker) -> None:
    half.weights_changed(True)
    half.take_report()
    orders = StepMetadata(
        observes=[ObserveJob("ridge", EDGE, 7, 0, (3, 4), 0, 30)],
        harvests=[HarvestJob(8, (0, 1, 2), 0, 40, "text", "a", "", dense=True)],
        drops=[7],
        releases=["r"],
    )
    half.save(orders)
    report = half.take_report()
    assert report == WorkerReport(weights=1)  # and it is said again, should the first word of it have been lost
    assert len(half.store) == 0 and half.take_released() == {"r"}
    orders.weights = 1
    half.save(orders)
    report = half.take_report()
    assert report is not None
    assert report.stored == {8: 1} and report.examples == {}


def test_the_scheduler_half_forgets_too_and_keeps_nothing_of_what_was_half_computed() -> None:
    engine = Engine(half := make_half())
    content = list(range(100, 160))

    def request(agent: str) -> Any:
        head = [1000] * 10 if agent == "a" else [2000] * 14
        params = {
            "agent": agent,
            "segments": [segment("placeholder", len(head), len(head) + len(content), "q")],
            "response_name": f"agent:{agent}:response",
        }
        return make_request([*head, *content, 7, 8], params)

    engine.run(request("a"), list(range(300, 320)))
    half.edges.learned("ridge", EDGE, 3)
    half.edges.audited("ridge", EDGE, 9.0)
    running = request("b")
    half.on_new_request(running)
    assert engine.admit(running)
    engine.obey(engine.prefill(running))
    half.update_connector_output(WorkerReport(weights=2))
    assert len(half.index) == len(half.edges) == 0 and not half.edges.health("ridge", EDGE).audits
    kept, out = engine.finish(running, list(range(320, 340)))
    assert not kept and out is not None
    orders = engine.step()
    assert (orders.harvests, orders.observes, orders.weights) == ([], [], 2)
    half.update_connector_output(WorkerReport(weights=2))  # told again: nothing new
    meta, report = engine.run(request("a"), list(range(340, 360)))
    assert meta.loads == [] and report["loaded"] == 0
    assert engine.run(request("b"), list(range(360, 380)))[1]["loaded"] > 0


def test_ranks_join_what_they_know_of_weights() -> None:
    joined = WorkerReport(weights=1).aggregate(WorkerReport(weights=2))
    assert isinstance(joined, WorkerReport)
    assert joined.weights == 2


def test_a_state_file_is_not_written_of_weights_that_no_folder_has(
    half: ConnectorWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcomm_integrations.connector.worker.state_rpc.rank_heads", lambda config: (0, 2))
    model = SimpleNamespace(
        model=str(tmp_path / "a"),
        revision=None,
        hf_text_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 1}),
        get_total_num_kv_heads=lambda: 2,
    )
    parallel = SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=model)
    calls, path = StateRpc(config, half), str(tmp_path / "state")
    assert "error" not in calls.call("save", path, None)
    half.weights_changed(False)
    assert "replaced" in calls.call("save", path, None)["error"]
    half.weights_changed(True)
    model.model = str(tmp_path / "b")
    assert "error" not in calls.call("save", path, None)
    model.model = str(tmp_path / "a")
    assert calls._identity is not None and calls._identity.name.endswith("b")
