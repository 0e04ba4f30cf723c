"""The order in which fidelity benchmarks ask: every content through all agents, those to learn from first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.progress import Progress

from kvcomm_integrations.bench.prompting import Turn

Ask = Callable[[str, str, Sequence[Turn], int, bool], Turn]
"""Agent, content, what was said about it before, the content's number, whether to learn from it: the agent's turn."""


def rounds(
    progress: Progress, taught: Sequence[str], measured: Sequence[str], agents: Sequence[str], ask: Ask
) -> Iterator[tuple[int, bool]]:
    """Ask all agents about one content after the other, each hearing those before it.

    Yields:
        after each content, its number and whether it was one to learn from.
    """
    task = progress.add_task("teaching", total=(len(taught) + len(measured)) * len(agents))
    for number, content in enumerate([*taught, *measured]):
        teach = number < len(taught)
        turns: list[Turn] = []
        for agent in agents:
            turns.append(ask(agent, content, turns, number, teach))
            progress.update(task, advance=1, description="teaching" if teach else "measuring")
        yield number, teach
