"""What a check has found, and how findings are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.table import Table
from rich.text import Text


class State(StrEnum):
    """How a check ended. Only ``bad`` makes the command fail."""

    GOOD = "good"
    WEAK = "weak"
    """It works, but not all of it, or not well."""
    BAD = "bad"
    SKIPPED = "skipped"


STYLES = {State.GOOD: "green", State.WEAK: "yellow", State.BAD: "bold red", State.SKIPPED: "dim"}


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's answer."""

    name: str
    state: State
    found: str
    remedy: str = ""
    """What to do; empty if there is nothing to do."""


@dataclass(frozen=True)
class Measured(Finding):
    """A check that stands in the table of ``kvcomm doctor --smoke``."""

    dense: str = ""
    reuse: str = ""


def good(name: str, found: str) -> Finding:
    """A check that passed."""
    return Finding(name, State.GOOD, found)


def weak(name: str, found: str, remedy: str) -> Finding:
    """A check that found something that could be better."""
    return Finding(name, State.WEAK, found, remedy)


def bad(name: str, found: str, remedy: str) -> Finding:
    """A check that failed."""
    return Finding(name, State.BAD, found, remedy)


def skipped(name: str, why: str) -> Finding:
    """A check that could not be made."""
    return Finding(name, State.SKIPPED, why)


def show(findings: Iterable[Finding], console: Console) -> int:
    """Print findings as they come; what was measured comes last, in a table.

    Returns:
        the exit status: 1 if one is bad, else 0.
    """
    status = 0
    measured: list[Measured] = []
    for finding in findings:
        status = max(status, int(finding.state is State.BAD))
        if isinstance(finding, Measured):
            measured.append(finding)
            continue
        line = Text.assemble((f"{finding.state.value:>8}", STYLES[finding.state]), f"  {finding.name}: {finding.found}")
        console.print(line)
        if finding.remedy:
            console.print(Text(f"{'':>8}  -> {finding.remedy}"))
    if measured:
        _show_table(measured, console)
    return status


def _show_table(measured: Sequence[Measured], console: Console) -> None:
    table = Table("check", "dense", "with reuse", "found", "verdict")
    for line in measured:
        table.add_row(line.name, line.dense, line.reuse, line.found, Text(line.state.value, STYLES[line.state]))
    console.print(table)
    for line in measured:
        if line.remedy:
            console.print(Text(f"{line.name}: {line.remedy}"))
