"""``kvcomm doctor``: each thing that can be wrong is told apart, with a remedy and an exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvcomm_integrations import cli
from kvcomm_integrations.chat.request_log import RunRecord
from kvcomm_integrations.doctor import machine, model
from kvcomm_integrations.doctor.diagnose import examine
from kvcomm_integrations.doctor.finding import Finding, State, show
from kvcomm_integrations.doctor.smoke import judge
from kvcomm_integrations.errors import ConfigurationError, MissingDependencyError


def test_a_good_machine_and_model(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--no-run", "--model", str(demo_model)]) == 0
    out = capsys.readouterr().out
    for words in ("Python: 3.", "PyTorch: 2.", "vLLM: 0.3", "full attention (llama)", "same tokens", "(--no-run)"):
        assert words in out
    assert " bad " not in out


def test_a_missing_model_is_bad(tmp_path: Path) -> None:
    findings = {finding.name: finding for finding in examine(str(tmp_path / "none"), run=True)}
    assert findings["Tokenizer"].state is State.BAD and "does not exist" in findings["Tokenizer"].found
    assert findings["Engine"].state is State.SKIPPED


@pytest.mark.parametrize(
    ("version", "state"), [((3, 10), "bad"), ((3, 11), "good"), ((3, 13), "good"), ((3, 14), "bad")]
)
def test_python_versions(version: tuple[int, int], state: str) -> None:
    assert machine.python(version).state == state


def test_no_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed", lambda package: None)
    finding = machine.frameworks()
    assert finding.state is State.WEAK and "[langgraph]" in finding.remedy


@pytest.mark.parametrize("error", [MissingDependencyError("vLLM cannot be imported"), ConfigurationError("vLLM 0.9")])
def test_vllm_missing_or_of_another_version(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> str:
        raise error

    monkeypatch.setattr("kvcomm_integrations.engines.vllm_args.require_vllm", fail)
    finding = machine.vllm()
    assert finding.state is State.BAD and str(error) in finding.found and "pip install" in finding.remedy


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "llama"}, ""),
        ({"sliding_window": 4096}, "sliding window of 4096"),
        ({"sliding_window": 4096, "use_sliding_window": False}, ""),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "hybrid"),
        ({"layer_types": ["full_attention", "full_attention"]}, ""),
        ({"text_config": {"sliding_window": 512}}, "sliding window"),
    ],
)
def test_attention(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    finding = model.attention(str(tmp_path))
    assert finding.state is (State.BAD if reason else State.GOOD)
    assert reason in finding.found


def test_attention_of_a_hub_id_is_not_known() -> None:
    assert model.attention("someone/some-model").state is State.SKIPPED


GOOD = {"disabled": "", "layout": "cpu", "verified": True}
LOADED = [RunRecord(agent="planner"), RunRecord(agent="solver", loaded=50, prompt_tokens=90)]


@pytest.mark.parametrize(
    ("stats", "refusal", "records", "name", "state"),
    [
        (GOOD, None, LOADED, "Reuse", State.GOOD),
        (GOOD, None, [RunRecord(), RunRecord(reason="too much would have to be repaired")], "Reuse", State.BAD),
        (GOOD, "pipeline parallelism is on", LOADED, "Repair pass", State.WEAK),
        (GOOD | {"verified": False}, None, LOADED, "Rotary positions", State.BAD),
        (GOOD | {"disabled": "unknown layout"}, None, LOADED, "Cache layout", State.BAD),
        (GOOD | {"layout": ""}, None, LOADED, "Cache layout", State.BAD),
    ],
)
def test_what_the_engine_says(
    stats: dict[str, Any], refusal: str | None, records: list[RunRecord], name: str, state: State
) -> None:
    finding = {finding.name: finding for finding in judge([stats], refusal, records)}[name]
    assert finding.state is state
    assert bool(finding.remedy) == (state is not State.GOOD)


def test_only_bad_fails() -> None:
    console = Console(file=None, quiet=True)
    assert (
        show([Finding("a", State.GOOD, ""), Finding("b", State.WEAK, ""), Finding("c", State.SKIPPED, "")], console)
        == 0
    )
    assert show([Finding("a", State.BAD, "no"), Finding("b", State.GOOD, "")], console) == 1
