"""``kvcomm top``: the live page's numbers in a terminal, fetched from a running engine's ``/kvcomm/data``."""

from __future__ import annotations

import time

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvcomm_integrations.errors import EngineError
from kvcomm_integrations.report.figures import by_agent, edges, totals, treated
from kvcomm_integrations.report.live import PATH, Snapshot
from kvcomm_integrations.report.words import STYLES, fixed, milliseconds, share, visible

LATEST = 8
"""Requests listed."""


def fetch(url: str, timeout: float = 5.0) -> Snapshot:
    """Ask a running engine.

    Args:
        url: the live page's address, with or without ``/kvcomm``.
        timeout: seconds to wait.

    Raises:
        EngineError: nothing answers there, or something else than the live page does.
    """
    address = url if "://" in url else f"http://{url}"
    address = f"{address.rstrip('/').removesuffix(PATH)}{PATH}/data"
    try:
        answer = httpx.get(address, timeout=timeout)
        answer.raise_for_status()
        return Snapshot.model_validate(answer.json())
    except (httpx.HTTPError, httpx.InvalidURL) as err:
        raise EngineError(
            f"{address} does not answer ({err}); start the page with model.live() or kvcomm serve --live, and give its "
            "address"
        ) from err
    except ValueError as err:
        raise EngineError(f"{address} is not a live page of kvcomm: {type(err).__name__}") from err


def view(now: Snapshot) -> Group:
    """The terminal view of a snapshot."""
    sums = totals(now.records)
    heading = Text.assemble(
        (visible(now.model.rstrip("/").rpartition("/")[2] or "any model"), "bold"),
        f"  {len(now.running)} running, {len(now.records)} finished, {sums.skipped} of {sums.prompt} prompt tokens not "
        f"computed ({share(sums.skipped, sums.prompt)})",
    )
    return Group(heading, _agents(now), _edges(now), _requests(now))


def _agents(now: Snapshot) -> Table:
    table = _table("Agents (medians)", "agent", "requests", "prompt", *STYLES, "first token", "dense")
    for agent in by_agent(now.records):
        table.add_row(
            Text(visible(agent.name)),
            str(agent.requests),
            *(Text(f"{median:.0f}", style=STYLES.get(kind, "")) for kind, median in agent.tokens.items()),
            milliseconds(agent.reuse_ms),
            milliseconds(agent.dense_ms),
        )
    return table


def _edges(now: Snapshot) -> Table:
    table = _table("Edges", "from", "to", "content", "loaded", "examples", "state", "divergence")
    for edge in edges(now.records):
        table.add_row(
            *(Text(visible(name)) for name in (edge.source, edge.target, edge.name)),
            str(edge.loaded),
            str(edge.examples),
            edge.health,
            fixed(edge.divergence, 3),
        )
    return table


def _requests(now: Snapshot) -> Table:
    table = _table("Latest requests", "request", "agent", "session", *STYLES, "first token", "total", "ended")
    for record in [*now.records[-LATEST:], *now.running]:
        table.add_row(
            str(record.number),
            Text(visible(record.agent)),
            Text(visible(record.session)),
            *(Text(str(tokens), style=STYLES[kind]) for kind, tokens in treated(record).items()),
            milliseconds(record.ttft_ms),
            milliseconds(record.total_ms),
            record.error or record.finish_reason or "running",
        )
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", expand=False)
    texts = ("agent", "session", "from", "to", "content", "state", "ended")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in texts else "right", overflow="fold", max_width=32)
    return table


def run_top(url: str, *, interval: float, once: bool) -> int:
    """Show the view until interrupted, or once.

    Raises:
        EngineError: the engine does not answer at the start.
    """
    console = Console()
    if once:
        if not console.is_terminal:
            console = Console(width=140)
        console.print(view(fetch(url)))
        return 0
    with Live(view(fetch(url)), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                live.update(view(fetch(url)), refresh=True)
            except EngineError as err:
                live.update(Text(f"{err}; trying again"), refresh=True)
