"""The comparison on transformers: its repair pass is exact where the KV is, and no engine takes part."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvcomm_integrations.bench.hf_bench import Bench, LayerErrors
from kvcomm_integrations.bench.hf_model import HFModel
from kvcomm_integrations.bench.prompting import TeamPrompts, Turn
from kvcomm_integrations.config import Gate
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.kv import KV

QUESTION = (
    "A farmer has 14 hens. Each lays 5 eggs a week and he sells a dozen for 3 dollars. What does he earn in a year?"
)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> HFModel:
    return HFModel(tiny_model)


def test_gaps_computed_over_exact_kv_are_dense(model: HFModel) -> None:
    ids = model.tokenizer.encode(QUESTION * 2, allow_special=False)
    dense = model.answer(ids, 4)
    end = len(ids) + 3
    for gaps in ([(0, end)], [(5, 6)], [(3, 9), (20, 31), (end - 7, end)]):
        kv = KV(*(side.clone() for side in dense.kv))
        for start, stop in gaps:
            kv.keys[:, :, start:stop] = kv.values[:, :, start:stop] = math.nan
        positions = [*(at for gap in gaps[:-1] for at in range(*gap)), *range(gaps[-1][0], end)]
        logits = model.compute(kv, (*ids, *dense.tokens), positions, 4)
        for mine, true in zip((*kv, logits), (*dense.kv, dense.logits), strict=True):
            torch.testing.assert_close(mine, true, atol=2e-4, rtol=1e-3)


def test_the_dense_answer_is_what_the_model_says_without_us(model: HFModel) -> None:
    ids = model.tokenizer.encode(QUESTION, allow_special=False)
    plain = model._model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(model.answer(ids, 1).logits[0], plain, atol=1e-4, rtol=1e-4)


def test_references_of_the_very_context_give_the_dense_result(model: HFModel) -> None:
    """Harvest, plan, correct, rotate, write and repair: with true references nothing is left to be wrong."""
    bench = Bench(model, ["aligned"], 4, 4)
    answer = Turn("planner", tuple(model.tokenizer.encode("He earns about 390 dollars.", allow_special=False)))
    prompt = bench.resolve(TeamPrompts(model.tokenizer).write("solver", QUESTION, [answer]), "solver")
    dense = model.answer(prompt.token_ids, 4)
    bench.remember(prompt, dense)
    bench.compare("aligned", prompt, dense)
    score = bench.scores["aligned"].summary()
    assert score["agreement"] == 1 and score["kl_mean"] < 1e-6
    assert score["repaired_share"] > 0 and score["reuse_rate_tokens"] > 0
    errors = bench.errors["aligned"].summary()
    assert max(errors["key_error"] + errors["value_error"]) < 1e-4


def test_the_plan_repairs_as_the_gate_says(model: HFModel) -> None:
    bench = Bench(model, ["aligned", "kvcomm"], 4, 4)
    said = TeamPrompts(model.tokenizer).write("solver", QUESTION, [])
    planner, prompt = bench.resolve(said, "planner"), bench.resolve(said, "solver")
    assert bench.plan("aligned", prompt).plan is None
    bench.remember(planner, model.answer(planner.token_ids, 4))
    (segment,) = said.segments
    tokens = segment.end - segment.start
    deep, unrepaired = bench.plan("aligned", prompt), bench.plan("kvcomm", prompt)
    bench._examples[Edge("planner", "solver", "user_question", prompt.tenant)] = 9
    shallow = bench.plan("aligned", prompt)
    for planned, depth in ((deep, tokens // 2), (shallow, 8), (unrepaired, 0)):
        plan = planned.plan
        assert plan is not None and plan.exact == segment.start
        contents = [span for span in plan.spans if span.start < segment.end]
        assert [(span.start, span.end) for span in contents] == [(segment.start + depth, segment.end)]


def test_a_chain_is_for_policies_that_want_it_and_the_entropy_gate_asks_for_a_dense_run(model: HFModel) -> None:
    said = TeamPrompts(model.tokenizer).write("solver", QUESTION, [])
    for gate in (Gate.MATURITY, Gate.ENTROPY):
        bench = Bench(model, ["kvcomm", "kvcmas"], 4, 4, gate)
        for agent in ("planner", "critic"):
            prompt = bench.resolve(said, agent)
            bench.remember(prompt, model.answer(prompt.token_ids, 4))
        solver = bench.resolve(said, "solver")
        for policy, source in (("kvcomm", "planner"), ("kvcmas", "critic")):
            planned = bench.plan(policy, solver)
            if gate is Gate.ENTROPY:
                assert planned.plan is None and "entropy gate" in planned.reason
            else:
                assert planned.candidates[1].edge.source == source


def test_errors_are_relative_and_explained_counts_from_layer_1() -> None:
    truth = KV(torch.ones(2, 1, 3, 2), torch.full((2, 1, 3, 2), 2.0))
    aligned = KV(truth.keys * 1.5, truth.values * 1.2)
    estimate = KV(truth.keys * 1.25, truth.values)
    errors = LayerErrors(2)
    errors.add(estimate, aligned, truth)
    found = errors.summary()
    assert found["key_error"] == pytest.approx([0.25, 0.25]) and found["value_error"] == [0.0, 0.0]
    assert found["explained_keys"] == pytest.approx(0.75) and found["explained_values"] == pytest.approx(1.0)


def test_the_command_runs_without_an_engine(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from kvcomm_integrations.cli import main\n"
        f"sys.exit(main(['bench', 'fidelity', '--hf', '--model', {str(tiny_model)!r}, '--agents', '3', '--warmup', '2',"
        " '--measure', '1', '--max-tokens', '12', '--tokens', '4', '--json',"
        f" {str(out)!r}, '--policies', 'ridge,kvcomm,kvcmas:rank=4,cacheblend,full_share,aligned']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    policies = json.loads(out.read_text())["policies"]
    assert list(policies) == ["ridge", "kvcomm", "kvcmas:rank=4", "cacheblend", "full_share", "aligned"]
    for name, score in policies.items():
        assert score["n"] == 2 and score["kl_mean"] >= 0 and not math.isnan(score["kl_mean"])
        assert len(score["key_error"]) == len(score["value_error"]) == 4
        assert score["key_error"][0] < 1e-3 or name == "full_share"
    assert policies["aligned"]["explained_values"] == pytest.approx(0)
    assert policies["ridge"]["state_bytes_per_edge"] > 0
    assert "Relative error" in done.stdout
