"""``kvcomm bench planning``: it runs, and its figures hang together. How fast the machine is, is not tested here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcomm_integrations import cli
from kvcomm_integrations.bench import plan_cost as planning


def test_figures(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "planning.json"
    options = ["--model", str(demo_model), "--tokens", "500", "--contents", "40", "--repeats", "2", "--json", str(out)]
    assert cli.main(["bench", "planning", *options]) == 0
    shown = capsys.readouterr()
    assert "Planning a prompt" in shown.out
    assert "planning prompts of 500 tokens" in shown.err.splitlines()
    (result,) = json.loads(out.read_text())
    assert 500 <= result["prompt_tokens"] < 800 and result["placeholders"] >= 5
    for kind in ("first", "next"):
        assert list(result[kind]) == list(planning.STAGES)
        assert all(ms > 0 for ms in result[kind].values())
        assert sum(result[kind][stage] for stage in planning.STAGES[:-1]) <= 1.5 * result[kind]["total"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--tokens", "0"], "must be at least 1, got 0"),
        (["--contents", "0"], "must be at least 1, got 0"),
        (["--tokens", "9000", "--contents", "3"], "ask for more contents"),
    ],
)
def test_impossible_wishes(
    demo_model: Path, capsys: pytest.CaptureFixture[str], options: list[str], complaint: str
) -> None:
    try:
        status = cli.main(["bench", "planning", "--model", str(demo_model), "--repeats", "1", *options])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert complaint in capsys.readouterr().err
