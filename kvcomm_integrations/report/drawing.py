"""What the report's pictures show: bars in milliseconds or tokens, and the graph of agents. The templates draw them.

Colours and patterns come from the style sheet by class, so a picture follows light and dark. Pictures are hidden from
screen readers: a table beside each one says the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcomm_integrations.chat.request_log import RunRecord
from kvcomm_integrations.report.figures import AgentFigures, EdgeFigures, SessionRuns
from kvcomm_integrations.report.words import milliseconds, segment_title
from kvcomm_integrations.wire import SHOWN_ORDER, Health, SegmentReport

WIDTH = 900
MAX_LABEL = 20

Point = tuple[float, float]


@dataclass(frozen=True)
class Bar:
    """A stretch of a row; ``kind`` is its class in the style sheet."""

    start: float
    length: float
    kind: str
    title: str


@dataclass(frozen=True)
class Row:
    """Bars side by side, milliseconds, with a heading on the left and a note on the right."""

    name: str
    way: str
    bars: tuple[Bar, ...]
    note: str = ""

    @property
    def end(self) -> float:
        """Where the last bar ends."""
        return max((bar.start + bar.length for bar in self.bars), default=0.0)


@dataclass(frozen=True)
class Arrow:
    """A curved arrow of the graph, as an SVG path."""

    path: str
    health: Health
    width: float
    title: str


@dataclass(frozen=True)
class Graph:
    """The graph of agents, laid out on a canvas of ``WIDTH`` by ``height``."""

    height: float
    places: dict[str, Point]
    """Where each agent stands."""
    arrows: tuple[Arrow, ...]


def agent_rows(agents: Sequence[AgentFigures]) -> list[Row]:
    """Median time to the first token of each agent by phase, beside the same without reuse."""
    rows = []
    for agent in agents:
        ways = (("with reuse", agent.reuse, agent.reuse_ms), ("dense", agent.dense, agent.dense_ms))
        for way, phases, first_ms in ways:
            if phases:
                name = "" if way == "dense" and agent.reuse else agent.name
                spent = {phase: median for phase, median in phases.items() if phase != "decode"}
                rows.append(Row(name, way, tuple(_chain(spent)), milliseconds(first_ms)))
    return rows


def session_rows(runs: SessionRuns) -> list[Row]:
    """The requests of one session over time, a row per agent; below it the same session run densely, if it was."""
    ways = (("with reuse", runs.records), ("dense", runs.dense)) if runs.dense else (("", runs.records),)
    return [
        Row("" if way == "dense" else agent, way, tuple(_requests(agent, records)))
        for agent in dict.fromkeys(record.agent for record in runs.records)
        for way, records in ways
    ]


def _requests(agent: str, records: Sequence[RunRecord]) -> Iterable[Bar]:
    origin = min(record.started for record in records)
    for record in records:
        if record.agent == agent:
            yield from _chain(record.phases, (record.started - origin) * 1e3, f"{agent}, request {record.number}: ")


def _chain(phases: dict[str, float], start: float = 0.0, prefix: str = "") -> Iterable[Bar]:
    """A bar for each phase, one after another."""
    for phase, spent in phases.items():
        if spent > 0:
            yield Bar(start, spent, f"phase-{phase}", f"{prefix}{phase} {milliseconds(spent)}")
        start += spent


def prompt_bars(record: RunRecord) -> list[Bar]:
    """One prompt's tokens in order, by what became of them."""
    if not record.segments:
        return [Bar(0, record.prompt_tokens, "kind-computed", "no report came back")]
    bars = []
    for number, segment in enumerate(record.segments):
        start, words = segment.start, segment_words(segment)
        if record.texts is not None and number < len(record.texts):
            words += f"\n{record.texts[number][:300]}"
        for kind in SHOWN_ORDER:
            if count := getattr(segment, kind):
                bars.append(Bar(start, count, f"kind-{kind}", words))
                start += count
    return bars


def segment_words(segment: SegmentReport) -> str:
    """A segment in one sentence, for hovering."""
    counts = [f"{count} {kind}" for kind in SHOWN_ORDER if (count := getattr(segment, kind))]
    words = f"{segment_title(segment)}: {segment.end - segment.start} tokens ({', '.join(counts)})"
    if segment.source:
        words += f", from {segment.source}"
    if segment.confidence is not None:
        words += f", confidence {segment.confidence:.2f}"
    return f"{words}; {segment.reason}" if segment.reason else words


def agent_graph(edges: Sequence[EdgeFigures]) -> Graph:
    """Agents on a circle; an arrow from the agent whose cache was used to the one that used it, by its worst health."""
    names = list(dict.fromkeys(name for edge in edges for name in (edge.source, edge.target)))
    radius = 90 + 12 * len(names)
    middle = radius + 56
    angles = [2 * math.pi * number / len(names) - math.pi / 2 for number in range(len(names))]
    spots = [(WIDTH / 2 + 1.6 * radius * math.cos(a), middle + radius * math.sin(a)) for a in angles]
    places = dict(zip(names, spots, strict=True))
    pairs: dict[tuple[str, str], list[EdgeFigures]] = {}
    for edge in edges:
        pairs.setdefault((edge.source, edge.target), []).append(edge)
    most = max((sum(edge.loaded for edge in group) for group in pairs.values()), default=0) or 1
    arrows = []
    for (source, target), group in pairs.items():
        health = max((edge.health for edge in group), key=list(Health).index)
        words = "; ".join(f"{edge.name}, {edge.loaded} tokens loaded" for edge in group)
        path = _loop(places[source]) if source == target else _curve(places[source], places[target])
        width = 1.2 + 4 * sum(edge.loaded for edge in group) / most
        arrows.append(Arrow(path, health, width, f"{source} to {target}, {health}: {words}"))
    return Graph(2 * middle, places, tuple(arrows))


def _curve(start: Point, end: Point) -> str:
    (x1, y1), (x2, y2) = start, end
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    bend = 0.12 * length
    mx, my = (x1 + x2) / 2 - dy * bend, (y1 + y2) / 2 + dx * bend
    numbers = x1 + 18 * dx, y1 + 18 * dy, mx, my, x2 - 20 * dx, y2 - 20 * dy
    return "M{} {}Q{} {} {} {}".format(*map(short, numbers))


def _loop(at: Point) -> str:
    x, y = at
    numbers = x - 10, y - 14, x - 40, y - 60, x + 40, y - 60, x + 10, y - 14
    return "M{} {}C{} {} {} {} {} {}".format(*map(short, numbers))


def short(value: float) -> str:
    """A coordinate, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


def abridged(name: str) -> str:
    """A name that fits beside a row or below an agent."""
    return name if len(name) <= MAX_LABEL else name[: MAX_LABEL - 1] + "…"
