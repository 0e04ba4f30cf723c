"""The table of ``kvcomm doctor --smoke``: verdicts, remedies, what is written, and what vLLM has decided, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcomm_integrations import cli
from kvcomm_integrations.bench.harness import Answer
from kvcomm_integrations.doctor import diagnose, smoke
from kvcomm_integrations.doctor.diagnose import overall
from kvcomm_integrations.doctor.finding import Finding, Measured, State, good
from kvcomm_integrations.doctor.measurements import (
    Greedy,
    SelfTest,
    judge_rounds,
    own_context,
    repair_agrees,
    same_answers,
)
from kvcomm_integrations.engines import vllm_args
from kvcomm_integrations.wire import RequestReport

DENSE = Greedy((5, 6, 7), {5: -1.0, 9: -1.1})


@pytest.mark.parametrize(
    ("other", "dtype", "state"),
    [
        (DENSE, "float32", State.GOOD),
        (Greedy((5, 6, 8), DENSE.first), "float32", State.BAD),
        (Greedy((9, 1, 2), {9: -1.0, 5: -1.1}), "float32", State.BAD),
        (Greedy((9, 1, 2), {9: -1.0, 5: -1.1}), "bfloat16", State.GOOD),
        (Greedy((5, 6, 7), {5: -2.0, 9: -1.1}), "bfloat16", State.BAD),
        (Greedy((1, 2, 3), {1: -1.0}), "bfloat16", State.BAD),
        (Greedy((1, 6, 7), {1: -0.2, 9: -1.2}), "bfloat16", State.BAD),
        (Greedy((9, 6, 7), {9: -1.05, 5: -1.1, 4: -0.2}), "float16", State.BAD),
        (Greedy((9, 6, 7), {9: -1.05, 5: -1.1, 4: -3.0}), "float16", State.GOOD),
    ],
)
def test_answers_are_the_same_but_for_ties_in_half_precision(other: Greedy, dtype: str, state: State) -> None:
    line = same_answers("dense answers", DENSE, other, dtype)
    assert line.state is state
    assert bool(line.remedy) == (state is State.BAD)


def test_nothing_loaded_back_is_bad() -> None:
    line = own_context(DENSE, Greedy((5, 6, 7), DENSE.first, 0, "not seen before"), "float32")
    assert line.state is State.BAD and "not seen before" in line.found
    assert own_context(DENSE, Greedy((5, 6, 7), DENSE.first, 40), "float32").state is State.GOOD


@pytest.mark.parametrize(
    ("errors", "dtype", "state"),
    [
        ([1e-6, 2e-6], "float32", State.GOOD),
        ([1e-6, 0.02], "float32", State.BAD),
        ([0.02], "bfloat16", State.GOOD),
        ([0.7], "bfloat16", State.BAD),
        ([float("inf")], "bfloat16", State.BAD),
        ([1e-6, None], "float32", State.BAD),
        ([], "float32", State.BAD),
    ],
)
def test_the_repair_pass_agrees_with_vllms_forward(errors: list[float | None], dtype: str, state: State) -> None:
    assert repair_agrees(errors, dtype).state is state


def _answer(ttft_ms: float, seconds: float = 1.0, **report: Any) -> Answer:
    return Answer((1, 2, 3), ttft_ms, RequestReport(**report), (0.0, seconds))


@pytest.mark.parametrize(
    ("reuse", "held", "name", "state", "words"),
    [
        (_answer(100, loaded=900, repaired=30), 2.0, "tokens reused", State.GOOD, "900 loaded, 30 repaired"),
        (_answer(100, loaded=900, repaired=30), 2.0, "first token, content of 1,000, ms", State.GOOD, "10.0 times"),
        (_answer(950, loaded=900, repaired=30), 2.0, "first token, content of 1,000, ms", State.WEAK, "1.1 times"),
        (_answer(100, loaded=900), 2.0, "tokens reused", State.WEAK, "0 repaired"),
        (_answer(100, reason="not seen before"), 2.0, "tokens reused", State.BAD, "not seen before"),
        (_answer(100, loaded=9, repaired=1), 2.0, "harvest, ms", State.GOOD, "0.1%"),
        (_answer(100, loaded=9, repaired=1), 301.0, "harvest, ms", State.WEAK, "30.0%"),
        (_answer(100, loaded=9, repaired=1), 2.0, "decoding, tokens/s", State.GOOD, "+0%"),
        (_answer(100, 2.0, loaded=9, repaired=1), 2.0, "decoding, tokens/s", State.WEAK, "-50%"),
    ],
)
def test_what_a_loaded_content_gains_and_costs(reuse: Answer, held: float, name: str, state: State, words: str) -> None:
    harvest = {"held_ms": {"dense": [1.0], "observe": [held]}, "us_per_token": held - 1.0}
    lines = {line.name: line for line in judge_rounds(1000, [_answer(1000)], [reuse], harvest)}
    assert len(lines) == 4
    assert lines[name].state is state and words in lines[name].found
    assert bool(lines[name].remedy) == (state is not State.GOOD)


def test_one_table_a_verdict_for_each_line_and_all_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[SelfTest] = []

    def found(model: str | None, *, run: bool, test: SelfTest) -> Iterator[Finding]:
        given.append(test)
        test.figures["content"] = test.content
        yield good("Engine", "started")
        yield Measured("first token", State.GOOD, "4 times sooner", dense="400", reuse="100")
        yield Measured("repair pass", State.BAD, "0.7 off", "switch reuse off")

    monkeypatch.setattr(diagnose, "examine", found)
    file = tmp_path / "doctor.json"
    options = ["--dtype", "float16", "--no-enforce-eager", "--max-model-len", "4096", "--fast"]
    assert cli.main(["doctor", "--smoke", *options, "--json", str(file)]) == 1
    out = capsys.readouterr().out
    for words in ("Engine: started", "with reuse", "4 times sooner", "repair pass: switch reuse off"):
        assert words in out
    assert out.count("4 times sooner") == 1
    assert out.splitlines()[-1].startswith("Overall: 1 bad") and str(file) in out.splitlines()[-1]
    assert given[0].settings == {"dtype": "float16", "enforce_eager": False, "max_model_len": 4096}
    assert given[0].content == 256 and given[0].rounds == 1
    written = json.loads(file.read_text(encoding="utf-8"))
    assert [finding["state"] for finding in written["findings"]] == ["good", "good", "bad"]
    assert written["figures"] == {"content": 256}


def test_the_last_line() -> None:
    weak = Measured("decoding", State.WEAK, "slower", "again")
    assert overall([good("Engine", "started"), Finding("Device", State.WEAK, "CPU")], "") == "Overall: good"
    assert overall([Finding("Reuse", State.BAD, "none")], "").startswith("Overall: 1 bad")
    assert overall([weak, weak], "x.json").startswith("Overall: 2 weak. ") and "x.json" in overall([weak], "x.json")
    assert "--json FILE" in overall([weak], "")


HOW = {"runner": 2, "compilation": "vllm_compile", "graphs": "full_and_piecewise", "dtype": "bfloat16"}


def test_what_vllm_has_decided_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "physical_cores", lambda: 8)
    monkeypatch.setattr(vllm_args, "physical_cores", lambda: 8)
    monkeypatch.delenv(vllm_args.BINDING_VARIABLE, raising=False)
    monkeypatch.delenv(vllm_args.RESERVED_VARIABLE, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = smoke.in_force({**HOW, "block_size": 16, "attention": "FLASH_ATTN"})
    for words in ("second-generation", "vllm_compile", "full_and_piecewise", "FLASH_ATTN", "bfloat16", "blocks of 16"):
        assert words in said
    assert said.endswith("8 cores less 1 for vLLM's scheduler")
    said = smoke.in_force({**HOW, "runner": 1, "compilation": "none", "graphs": "none", "block_size": 128})
    assert "first-generation" in said and "compilation off, graphs off, attention not known" in said
    monkeypatch.setenv(vllm_args.BINDING_VARIABLE, "0,1")
    assert smoke.in_force({**HOW, "block_size": 16}).endswith("cores 0,1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "cores" not in smoke.in_force({**HOW, "block_size": 16})


def test_an_option_that_cannot_be_is_one_line() -> None:
    [finding] = smoke.smoke("no-model", SelfTest({"max_model_len": 1}))
    assert finding.state is State.BAD and "max_model_len" in finding.found
