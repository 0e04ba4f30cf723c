"""What benchmarks show while they run, with a terminal and without one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rich.console import Console

from kvcomm_integrations.bench import harness, scores
from kvcomm_integrations.bench.prompting import Turn


def test_without_a_terminal_each_new_step_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    long = "two of 2: a text that is longer than a terminal is wide " + "x" * 80
    with harness.progress("starting", total=3) as step:
        for text, shown in (("[one] of 2", "starting\n[one] of 2\n"), ("[one] of 2", ""), (long, f"{long}\n")):
            step(text, done=1)
            assert capsys.readouterr() == ("", shown), "at once, and standard output is for results"


def test_the_first_step_is_shown_before_anything_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    with harness.progress("starting vLLM"):
        assert capsys.readouterr().err == "starting vLLM\n"


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Terminal(Console):
        def __init__(self, **settings: object) -> None:
            super().__init__(force_terminal=True, width=100, record=True)
            made.append(self)

    monkeypatch.setattr(harness, "Console", Terminal)
    with harness.progress(total=2) as step:
        step("teaching", done=1)
    text = made[0].export_text()
    assert "teaching" in text and "50%" in text and text.count("teaching\n") == 0


def test_fidelity_benchmarks_say_which_content_they_are_at() -> None:
    shown: list[str] = []

    def ask(agent: str, content: str, turns: Sequence[Turn], *, number: int, teach: bool) -> Turn:
        return Turn(agent, (number,))

    def step(text: str, done: int = 0) -> None:
        shown.extend([text] * done)

    assert list(scores.rounds(step, ["a", "b"], ["c"], ["planner"], ask)) == [(0, True), (1, True), (2, False)]
    assert shown == ["teaching, content 1 of 2", "teaching, content 2 of 2", "measuring, content 1 of 1"]
