"""The worker half on a paged cache of its own, without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.connector.metadata import StepMetadata
from kvcomm_integrations.connector.worker.paged_cache import Layout, PagedCache
from kvcomm_integrations.connector.worker.state_rpc import StateRpc
from kvcomm_integrations.connector.worker.worker import ConnectorWorker
from kvcomm_integrations.planning.jobs import HarvestJob, LoadJob, LoadSpan, ObserveJob
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.rope import Rope

LAYERS, HEADS, BLOCK, DIM = 3, 2, 16, 8
EDGE = Edge("a", "b", "text")


def _worker() -> ConnectorWorker:
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
    half = ConnectorWorker(config, ReuseConfig(policy="ridge"))
    cache = PagedCache([torch.zeros(12, HEADS, BLOCK, 2 * DIM) for _ in range(LAYERS)], Layout.CPU)
    half.use(cache, Rope(10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM)))
    half.verified = True
    return half


def _fill(half: ConnectorWorker, blocks: tuple[int, ...], tokens: int, seed: int) -> KV:
    """Random pre-RoPE KV, written into the cache as the engine would; returns it without rotation."""
    assert half.cache is not None and half.rope is not None
    generator = torch.Generator().manual_seed(seed)
    kv = KV(*(torch.randn(LAYERS, HEADS, tokens, DIM, generator=generator) for _ in range(2)))
    half.cache.write(blocks, 0, KV(half.rope.rotate(kv.keys, torch.arange(tokens)), kv.values))
    return kv


def _harvest(half: ConnectorWorker, ref_id: int, blocks: tuple[int, ...], start: int, end: int) -> None:
    job = HarvestJob(ref_id, blocks, start, end, name="text", source="a", scope="", dense=True)
    half.save(StepMetadata(harvests=[job]))


def test_an_example_pairs_the_truth_with_the_right_part_of_the_reference() -> None:
    half = _worker()
    source = _fill(half, (0, 1, 2), 40, seed=1)
    _harvest(half, 1, (0, 1, 2), 0, 40)
    truth = _fill(half, (3, 4), 25, seed=2)
    seen: list[tuple[KV, KV]] = []
    policy = half.learner.policy("ridge")
    policy.observe = lambda edge, reference, true: seen.append((reference, true))  # type: ignore[method-assign]
    half.save(StepMetadata(observes=[ObserveJob("ridge", EDGE, 1, 10, (3, 4), 5, 20)]))
    [(reference, true)] = seen
    assert torch.allclose(reference.keys, source.keys[:, :, 10:30], atol=1e-5)
    assert torch.equal(reference.values, source.values[:, :, 10:30])
    assert torch.allclose(true.keys, truth.keys[:, :, 5:25], atol=1e-5)


def test_a_load_rotates_a_part_to_where_it_belongs() -> None:
    half = _worker()
    source = _fill(half, (0, 1, 2), 40, seed=3)
    _harvest(half, 7, (0, 1, 2), 0, 40)
    span = LoadSpan(7, offset=12, start=21, end=33, edge=EDGE)
    half.load(StepMetadata(loads=[LoadJob("r", (5, 6, 7), "aligned", (span,), (), (0,) * 12, 21, 33)]))
    assert half.cache is not None and half.rope is not None
    got = half.cache.read((5, 6, 7), 21, 33)
    assert torch.allclose(got.keys, half.rope.rotate(source.keys[:, :, 12:24], torch.arange(21, 33)), atol=1e-4)
    assert torch.equal(got.values, source.values[:, :, 12:24])
    report = half.take_report()
    assert report is not None
    assert report.loads["r"].fault == ""
    assert half.loaded_tokens == 12


def test_unequal_keys_of_equal_tokens_switch_reuse_off() -> None:
    """Invariant 3: random keys stand for a rotation that is not the configuration's."""
    half = _worker()
    half.verified = False
    _fill(half, (0, 1), 24, seed=4)
    job = HarvestJob(1, (0, 1), 0, 24, "text", "a", "", True, check_ids=(5,) * 24)
    half.save(StepMetadata(harvests=[job]))
    report = half.take_report()
    assert report is not None
    assert "self-check" in report.disabled
    assert report.failed
    assert len(half.store) == 0


def _lessons(half: ConnectorWorker, *edges: Edge) -> None:
    for number, edge in enumerate(edges):
        _fill(half, (3, 4), 25, seed=10 + number)
        half.save(StepMetadata(observes=[ObserveJob("ridge", edge, 1, 0, (3, 4), 0, 20)]))


def test_an_edge_that_its_budget_evicts_has_no_examples_any_more() -> None:
    half = _worker()
    half.learner.config = half.config.model_copy(update={"state_bytes": 1})
    _fill(half, (0, 1, 2), 40, seed=1)
    _harvest(half, 1, (0, 1, 2), 0, 40)
    _lessons(half, EDGE, EDGE._replace(target="c"))
    report = half.take_report()
    assert report is not None
    assert report.examples == {("ridge", EDGE): 0, ("ridge", EDGE._replace(target="c")): 1}


def test_what_has_become_an_anchor_is_rated_again() -> None:
    """Rated at its harvest, before the edge had anchors, it would stay unpredictable for good."""
    half = _worker()
    _fill(half, (0, 1, 2), 40, seed=1)
    _harvest(half, 1, (0, 1, 2), 0, 40)
    rated = []
    for seed in (2, 3, 4):
        _fill(half, (3, 4, 5), 40, seed=seed)
        half.save(StepMetadata(observes=[ObserveJob("kvcomm", EDGE, 1, 0, (3, 4, 5), 0, 40)]))
        report = half.take_report()
        assert report is not None
        rated.append(report.leverage.get(("kvcomm", EDGE, 1)))
    assert rated[0] is None and rated[-1] is not None


def test_a_replaced_state_is_reported_with_the_leverage_of_what_is_held() -> None:
    half = _worker()
    _fill(half, (0, 1, 2), 40, seed=1)
    _harvest(half, 1, (0, 1, 2), 0, 40)
    _lessons(half, EDGE)
    half.take_report()
    with half.learner.relearning("ridge") as policy:
        policy.forget(EDGE)
        policy.observe(EDGE._replace(target="c"), half.store.get(1).kv, half.store.get(1).kv)
    report = half.take_report()
    assert report is not None
    assert report.examples == {("ridge", EDGE): 0, ("ridge", EDGE._replace(target="c")): 1}
    assert list(report.leverage) == [("ridge", EDGE._replace(target="c"), 1)]
    assert half.learner.background.wait(10)
    with half.learner.relearning("ridge") as policy:
        policy.forget(EDGE._replace(target="c"))


def test_calls_about_state_answer_with_their_error(tmp_path: Path) -> None:
    half = _worker()
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2, data_parallel_size=2))
    calls = StateRpc(config, half)
    assert "pipeline parallelism" in calls.call("save", str(tmp_path / "s"), None)["error"]
    assert "nothing has been loaded" in calls.call("apply", False)["error"]
    config.parallel_config.pipeline_parallel_size = 1
    assert "data parallelism" in calls.call("save", str(tmp_path / "s"), None)["error"]
    half.disable("an unknown layout")
    assert "an unknown layout" in calls.call("load", str(tmp_path / "s"), None)["error"]
    half.config = half.config.model_copy(update={"policy": "kvcomm"})
    half.disabled = ""
    assert "'kvcomm' learns cannot be kept" in calls.call("save", str(tmp_path / "s"), None)["error"]
    assert not list(tmp_path.iterdir())


def test_state_of_a_policy_with_options_is_kept_and_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of a variant take effect after learning: the file is the plain policy's."""
    half = _worker()
    half.config = half.config.model_copy(update={"policy": "ridge:rank=4"})
    _fill(half, (0, 1, 2), 40, seed=1)
    _harvest(half, 1, (0, 1, 2), 0, 40)
    _fill(half, (3, 4), 25, seed=10)
    half.save(StepMetadata(observes=[ObserveJob("ridge:rank=4", EDGE, 1, 0, (3, 4), 0, 20)]))
    monkeypatch.setattr("kvcomm_integrations.connector.worker.state_rpc.rank_heads", lambda config: (0, HEADS))
    text = SimpleNamespace(to_dict=lambda: {"hidden_size": 1})
    model = SimpleNamespace(
        model=str(tmp_path), revision=None, hf_text_config=text, get_total_num_kv_heads=lambda: HEADS
    )
    parallel = SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=model)
    calls, path = StateRpc(config, half), str(tmp_path / "state")
    saved = calls.call("save", path, None)
    assert (saved["edges"], saved["examples"]) == (1, 1)
    assert calls.call("clear", None) == {"edges": 1}
    assert calls.call("load", path, None) == {"edges": 1, "examples": 1}
    assert calls.call("apply", True) == {"edges": 1, "examples": 1}
    assert half.learner.policies["ridge:rank=4"].edges() == (EDGE,)
    assert list(half.learner.policies) == ["ridge:rank=4"]
    half.config = half.config.model_copy(update={"policy": "ridge"})
    assert "error" not in calls.call("load", path, None)
    half.config = half.config.model_copy(update={"state_bytes": 100})
    assert "state_bytes allows 100" in calls.call("load", path, None)["error"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", Layout)
def test_a_load_writes_the_plain_estimate(layout: Layout, dtype: torch.dtype) -> None:
    """Corrected and rotated a few layers at a time, straight into the cache: the same as one step after another."""
    half = _worker()
    assert half.rope is not None
    cache = PagedCache([torch.zeros(12, HEADS, BLOCK, 2 * DIM, dtype=dtype) for _ in range(LAYERS)], layout)
    half.use(cache, half.rope)
    for ref_id, seed in ((1, 5), (2, 6)):
        source = _fill(half, (0, 1, 2), 44, seed)
        _harvest(half, ref_id, (0, 1, 2), 0, 44)
        _fill(half, (3, 4, 5), 44, seed + 10)
        half.save(StepMetadata(observes=[ObserveJob("ridge", EDGE, ref_id, 0, (3, 4, 5), 2, 40)]))
    assert half.learner.background.wait(10)
    span = LoadSpan(2, offset=3, start=9, end=47, edge=EDGE)
    half.load(StepMetadata(loads=[LoadJob("r", (6, 7, 9), "ridge", (span,), (), (0,) * 38, 9, 47)]))
    got = cache.read((6, 7, 9), 9, 47)
    reference = half.store.get(2)
    assert torch.allclose(reference.keys.float(), source.keys, atol=1e-5 if dtype is torch.float32 else 0.1)
    part = KV(reference.keys[:, :, 3:41], reference.values[:, :, 3:41])
    plain = half.learner.policies["ridge"].correct(EDGE, part, 3)
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    expected = half.rope.rotate(plain.keys.float(), torch.arange(9, 47))
    assert torch.allclose(got.keys.float(), expected, atol=tolerance)
    assert torch.allclose(got.values.float(), plain.values.float(), atol=tolerance)
    assert (got.keys[1:].float() - half.rope.rotate(part.keys[1:].float(), torch.arange(9, 47))).abs().max() > 0.05
    assert half._mover is not None
    whole = half._mover.estimate("ridge", span)
    assert torch.equal(whole.keys.to(dtype), got.keys) and torch.equal(whole.values.to(dtype), got.values)
