"""What all benchmarks share: progress, requests and their answers, percentiles, tables, JSON files and plots."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvcomm_integrations.engines.interface import Engine, GenerationRequest, SamplingOptions
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.wire import KVCommParams, RequestReport

Step = Callable[..., None]
"""``step(text)``: this is being done now. ``step(text, done=1)``: and so many of the steps announced are done."""


@contextmanager
def progress(first: str = "starting vLLM", total: int | None = None) -> Iterator[Step]:
    """Show on standard error what is being done: a bar in a terminal, elsewhere a line for each new text.

    Args:
        first: what is done until the first step.
        total: steps there will be; ``None``: not known.
    """
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(first, total=total)
        shown = ""

        def step(text: str, done: int = 0) -> None:
            nonlocal shown
            bar.update(task, description=text, advance=done)
            if text != shown and not console.is_terminal:
                console.print(text, markup=False, soft_wrap=True)
            shown = text

        step(first)
        yield step


@dataclass(frozen=True)
class Answer:
    """What came back for a request."""

    tokens: tuple[int, ...]
    ttft_ms: float
    report: RequestReport
    """Empty where the engine sent none: it runs without the connector."""
    stamps: tuple[float, ...]
    """When each piece came, seconds of the monotonic clock."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, per second; 0 if there are none."""
        seconds = self.stamps[-1] - self.stamps[0]
        return (len(self.tokens) - 1) / seconds if seconds else 0.0


def ask(
    engine: Engine,
    prompt: SegmentedPrompt,
    sampling: SamplingOptions,
    agent: str,
    *,
    shared: bool = False,
    salt: str | None = None,
    **params: Any,
) -> Answer:
    """Send an agent's request and wait for its end.

    Args:
        engine, prompt, sampling, agent: who is asked what, how the answer is drawn, and for whom.
        shared: other agents will read the answer.
        salt: separates the prefix cache.
        params: other fields of ``KVCommParams``.
    """
    name = f"agent:{agent}:response" if shared else None
    wire = KVCommParams(segments=prompt.segments, agent=agent, response_name=name, **params)
    deltas, stamps = [], []
    for delta in engine.generate_sync(GenerationRequest(prompt, wire, sampling, cache_salt=salt)):
        stamps.append(time.monotonic())
        deltas.append(delta)
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    return Answer(tokens, deltas[-1].ttft_ms or 0.0, deltas[-1].report or RequestReport(), tuple(stamps))


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that at least ``share`` per cent of all do not exceed."""
    return sorted(values)[max(0, -(-share * len(values) // 100) - 1)]


def print_table(
    console: Console, title: str, headings: Sequence[str], rows: Iterable[Iterable[str]], left: Sequence[str] = ()
) -> None:
    """Print a table whose columns are flush right, but for those whose headings are in ``left``."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def show(
    title: str, headings: Sequence[str], rows: Iterable[Iterable[str]], *, width: int = 120, left: str = ""
) -> None:
    """``print_table`` on standard output, with at most ``width`` characters in a line."""
    print_table(Console(width=width), title, headings, rows, [left])


def save_json(args: argparse.Namespace, result: Any) -> None:
    """Write all figures, if a file was asked for; an object also gets the command line, as ``config``."""
    if args.json is None:
        return
    if isinstance(result, dict):
        result["config"] = {n: str(v) if isinstance(v, Path) else v for n, v in vars(args).items() if n != "command"}
    args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


@contextmanager
def plot(path: Path, width: int, columns: int = 1) -> Iterator[Any]:
    """Axes to draw into, with logarithmic heights, ``columns`` of them side by side; afterwards the picture is written.

    Its width is in inches, and the ending of ``path`` names its format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(width, 5), subplot_kw={"yscale": "log"})
    yield axes
    figure.savefig(path, dpi=120)
