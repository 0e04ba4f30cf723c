"""The command line: what it prints, and how it fails."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvcomm_integrations import __version__, cli, demo_model
from kvcomm_integrations.errors import ConfigurationError


@pytest.fixture
def demo_calls(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    calls: list[argparse.Namespace] = []
    module = ModuleType("kvcomm_integrations.demo")
    module.run_demo = calls.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvcomm_integrations.demo", module)
    return calls


def test_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcomm_integrations.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"kvcomm {__version__}\n"


def test_only_serve_takes_options_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvcomm_integrations.serve.launch as command

    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(command, "run_serve", lambda args: seen.append(args) or 0)
    assert cli.main(["serve", "m", "--port", "1", "--reuse", "{}", "--max-model-len=5"]) == 0
    assert (seen[0].model, seen[0].reuse, seen[0].vllm_options) == ("m", "{}", ["--port", "1", "--max-model-len=5"])
    with pytest.raises(SystemExit):
        cli.main(["demo", "--port", "1"])


def test_demo_has_defaults(demo_calls: list[argparse.Namespace]) -> None:
    assert cli.main(["demo"]) == 0
    args = vars(demo_calls[0])
    del args["command"]
    assert args == {
        "model": None,
        "questions": None,
        "agents": 4,
        "rounds": None,
        "max_tokens": None,
        "json": None,
        "report": None,
        "seed": 0,
    }


def test_demo_takes_options(demo_calls: list[argparse.Namespace]) -> None:
    options = "--model m --questions q.jsonl --agents 3 --rounds 2 --max-tokens 16 --json out.json --seed 7"
    assert cli.main(["demo", *options.split()]) == 0
    (args,) = demo_calls
    assert (args.model, args.questions, args.json) == ("m", Path("q.jsonl"), Path("out.json"))
    assert (args.agents, args.rounds, args.max_tokens, args.seed) == (3, 2, 16, 7)


@pytest.mark.parametrize("arguments", [[], ["fly"], ["demo", "--agents", "0"], ["demo", "--rounds", "many"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: kvcomm" in capsys.readouterr().err


def test_our_errors_take_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*args: object, **kwargs: object) -> Path:
        raise ConfigurationError("dtype 'int3' is not known; use 'auto'")

    monkeypatch.setattr(demo_model, "ensure_demo_model", fail)
    assert cli.main(["model"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "kvcomm: dtype 'int3' is not known; use 'auto'\n")


def test_interrupt_is_not_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object, **kwargs: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "ensure_demo_model", interrupt)
    assert cli.main(["model"]) == 130
    assert capsys.readouterr().err == "kvcomm: interrupted\n"


def test_model_prints_the_folder_only(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model"]) == 0
    folder = Path(capsys.readouterr().out.removesuffix("\n"))
    assert (folder / "config.json").is_file()


def test_report_makes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "run.jsonl"
    runs.write_text('{"agent": "critic", "segments": [], "prompt_tokens": 7}\n')
    assert cli.main(["report", str(runs), "-o", str(tmp_path / "out.html")]) == 0
    assert "critic" in (tmp_path / "out.html").read_text()
    assert capsys.readouterr().out == f"{tmp_path / 'out.html'}: 1 requests\n"
    assert cli.main(["report", str(tmp_path / "none.jsonl")]) == 2
