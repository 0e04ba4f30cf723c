"""The benchmarks that start engines of their own, on a tiny model: they run, and their files hold what they say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvcomm_integrations import cli

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _no_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks say which cores all engines get; what it was before is put back."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")


def test_plain_vllm_runs_beside_ours(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ttft.json"
    assert cli.main(["bench", "ttft", "--fast", "--model", str(tiny_model), "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["plain"] == result["kvcomm"], "dtype, blocks, compilation and all else"
    assert result["plain"]["prefix_caching"]
    assert "each in a process of its own" in capsys.readouterr().out
    dense, ridge = (result["settings"][0]["rounds"][way]["2"] for way in ("dense", "ridge"))
    assert all(answer["ttft_ms"] > 0 for answer in (*dense, *ridge))
    assert [answer["prompt_tokens"] for answer in dense] == [0], "plain vLLM sends no report"
    assert all(answer["prompt_tokens"] > 128 + 256 for answer in ridge)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"]


def test_one_file_says_all_of_a_gpu(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert cli.main(["bench", "gpu", "--fast", "--model", str(tiny_model), "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert {"vllm", "dtype", "graphs", "runner", "layout", "repair_refusal"} <= set(result["engine"])
    (setting,) = result["settings"]
    assert [len(agent) for agent in setting["rounds"]["ridge"].values()] == [1, 1, 1]
    for agent in setting["policies"]["ridge"]:
        assert agent["decode_dense_per_s"] > 0 and agent["decode_reuse_per_s"] > 0
    assert all(len(held) == 1 for held in setting["harvest"]["held_ms"].values())


def test_a_conversation_is_compared_by_turn(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "fidelity.json"
    command = ["bench", "turns", "--fidelity", "--scenario", "chat", "--fast", "--dtype", "float32"]
    assert cli.main([*command, "--model", str(tiny_model), "--json", str(out)]) == 0
    first, *later = json.loads(out.read_text())["fidelity"]
    assert first["kl_first"] < 1e-4 and first["agreement"] == 1.0, "nothing is loaded: it is the same run"
    assert any(line["loaded"] > 0 for line in later) and all(0 <= line["kl_mean"] < 5 for line in later)


@pytest.mark.reliability
def test_ways_of_learning_are_compared(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "tail.json"
    assert cli.main(["bench", "tail", "--fast", "--model", str(tiny_model), "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert set(result["ways"]) == {"dense", "sampling", "shadow"}
    assert all(0 < way["p50"] <= way["p99"] for way in result["ways"].values())
    assert result["ways"]["shadow"]["dense"] == 0 < result["ways"]["dense"]["dense"]
    assert all(rate > 0 for rates in result["requests_per_s"].values() for rate in rates)
