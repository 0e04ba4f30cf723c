"""The report's pictures as SVG: bars of phases, timelines, prompt maps, the graph of agents.

Colours and patterns come from the style sheet by class, so a picture follows light and dark. Pictures are hidden from
screen readers: a table beside each one says the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvcomm_integrations.chat.request_log import PHASES, RunRecord
from kvcomm_integrations.report.figures import KINDS, AgentFigures, EdgeFigures, Phases
from kvcomm_integrations.report.markup import Markup, join, tag
from kvcomm_integrations.report.words import milliseconds
from kvcomm_integrations.wire import SegmentKind, SegmentReport

WIDTH = 900
LABEL = 150
ROW = 26
BAR = 18
MAX_LABEL = 20
SHOWN_ORDER = ("exact", "repaired", "loaded", "computed")
"""Order of what becomes of a placeholder's tokens, from its first on."""


def definitions() -> Markup:
    """The patterns every picture of the page refers to: one per kind of token, told apart without colour."""
    marks = {
        "loaded": tag("path", d="M-2 2l4-4M0 8l8-8M6 10l4-4", class_="mark"),
        "repaired": tag("circle", cx=4, cy=4, r=1.7, class_="dot"),
        "computed": tag("path", d="M0 4h8M4 0v8", class_="mark"),
    }
    patterns = [
        tag(
            "pattern",
            tag("rect", width=8, height=8, class_=f"fill-{kind}"),
            marks.get(kind),
            id=f"p-{kind}",
            width=8,
            height=8,
            patternUnits="userSpaceOnUse",
        )
        for kind in KINDS
    ]
    arrow = tag(
        "marker",
        tag("path", d="M0 0L10 5L0 10z", class_="arrow"),
        id="arrow",
        viewBox="0 0 10 10",
        refX=9,
        refY=5,
        markerWidth=12,
        markerHeight=12,
        markerUnits="userSpaceOnUse",
        orient="auto-start-reverse",
    )
    return tag("svg", tag("defs", patterns, arrow), width=0, height=0, aria_hidden="true", class_="defs")


def agent_bars(agents: Sequence[AgentFigures]) -> Markup:
    """Median time to the first token of each agent by phase, beside the same without reuse."""
    rows: list[tuple[str, str, Phases]] = []
    for agent in agents:
        if agent.reuse:
            rows.append((agent.name, "with reuse", agent.reuse))
        if agent.dense:
            rows.append((agent.name if not agent.reuse else "", "dense", agent.dense))
    longest = max((phases.ttft_ms for _, _, phases in rows), default=0.0) or 1.0
    scale = (WIDTH - LABEL - 180) / longest
    lines = []
    for number, (name, way, phases) in enumerate(rows):
        y = number * ROW
        x = LABEL + 90.0
        lines.append(_label(name, y))
        lines.append(tag("text", way, x=LABEL, y=y + 14, class_="quiet"))
        for phase in PHASES[:-1]:
            width = phases.phases[phase] * scale
            lines.append(_bar(x, y, width, f"phase-{phase}", f"{phase}: {milliseconds(phases.phases[phase])}"))
            x += width
        lines.append(tag("text", milliseconds(phases.ttft_ms), x=_n(x + 6), y=y + 14))
    return _svg(lines, WIDTH, len(rows) * ROW)


def timeline(records: Sequence[RunRecord], dense: Sequence[RunRecord] = ()) -> Markup:
    """The requests of one session over time: a row per agent, each request's phases one after another.

    Args:
        records: the session's requests.
        dense: the same session run densely, drawn below each agent's row from its own start; empty if there is none.
    """
    agents = list(dict.fromkeys(record.agent for record in records))
    step = 2 * ROW if dense else ROW
    ways = [(records, 0), (dense, ROW)] if dense else [(records, 0)]
    span = max(_span(own) for own, _ in ways) or 1.0
    left = LABEL + (90 if dense else 0)
    scale = (WIDTH - left - 20) / span
    lines = []
    for row, name in enumerate(agents):
        lines.append(_label(name, row * step))
        if dense:
            lines.append(tag("text", "with reuse", x=LABEL, y=row * step + 14, class_="quiet"))
            lines.append(tag("text", "dense", x=LABEL, y=row * step + ROW + 14, class_="quiet"))
    for own, shift in ways:
        origin = min(record.started for record in own)
        for record in own:
            x, y = left + (record.started - origin) * 1e3 * scale, agents.index(record.agent) * step + shift
            for phase, spent in record.phases.items():
                title = f"{record.agent}, request {record.number}: {phase} {milliseconds(spent)}"
                lines.append(_bar(x, y, spent * scale, f"phase-{phase}", title))
                x += spent * scale
    bottom = len(agents) * step
    for share in (0.0, 0.5, 1.0):
        x = left + share * (WIDTH - left - 20)
        anchor = {0.0: "start", 0.5: "middle", 1.0: "end"}[share]
        lines.append(tag("line", x1=_n(x), x2=_n(x), y1=0, y2=bottom + 4, class_="axis"))
        lines.append(
            tag("text", milliseconds(share * span), x=_n(x), y=bottom + 18, text_anchor=anchor, class_="quiet")
        )
    return _svg(lines, WIDTH, bottom + 24)


def _span(records: Sequence[RunRecord]) -> float:
    """Milliseconds from the first request's start to the last one's end."""
    origin = min(record.started for record in records)
    return max((record.started - origin) * 1e3 + record.total_ms for record in records)


def prompt_map(record: RunRecord, longest: int) -> Markup:
    """One prompt as a bar: its tokens in order, by what became of them; a line above shared contents.

    Args:
        record: the request.
        longest: prompt tokens that fill the whole width.
    """
    scale = WIDTH / max(1, longest)
    lines = []
    for number, segment in enumerate(record.segments):
        x = segment.start * scale
        title = segment_words(segment)
        if record.texts is not None and number < len(record.texts):
            title += f"\n{record.texts[number][:300]}"
        for kind in SHOWN_ORDER:
            width = getattr(segment, kind) * scale
            lines.append(_bar(x, 5, width, f"kind-{kind}", title))
            x += width
        if segment.kind is SegmentKind.PLACEHOLDER:
            width = (segment.end - segment.start) * scale
            lines.append(
                tag("rect", x=_n(segment.start * scale), y=0, width=_n(max(1.0, width - 1)), height=3, class_="shared")
            )
    if not record.segments:
        lines.append(_bar(0, 5, record.prompt_tokens * scale, "kind-computed", "no report came back"))
    return _svg(lines, WIDTH, BAR + 7)


def segment_words(segment: SegmentReport) -> str:
    """A segment in one sentence, for hovering."""
    name = segment.name or "template text"
    counts = [f"{count} {kind}" for kind in SHOWN_ORDER if (count := getattr(segment, kind))]
    words = f"{name}: {segment.end - segment.start} tokens ({', '.join(counts)})"
    if segment.source:
        words += f", from {segment.source}"
    if segment.confidence is not None:
        words += f", confidence {segment.confidence:.2f}"
    return f"{words}; {segment.reason}" if segment.reason else words


def agent_graph(edges: Sequence[EdgeFigures]) -> Markup:
    """Agents on a circle; an arrow from the agent whose cache was used to the one that used it."""
    names = list(dict.fromkeys(name for edge in edges for name in (edge.source, edge.target)))
    radius = 90 + 12 * len(names)
    middle = radius + 40
    across = WIDTH / 2
    places = {}
    for number, name in enumerate(names):
        angle = 2 * math.pi * number / len(names) - math.pi / 2
        places[name] = (across + 1.6 * radius * math.cos(angle), middle + radius * math.sin(angle))
    pairs: dict[tuple[str, str], list[EdgeFigures]] = {}
    for edge in edges:
        pairs.setdefault((edge.source, edge.target), []).append(edge)
    most = max((sum(e.loaded for e in group) for group in pairs.values()), default=0) or 1
    lines: list[Markup] = []
    for (source, target), group in pairs.items():
        loaded = sum(edge.loaded for edge in group)
        health = next((h for h in ("closed", "deeper") if any(e.health == h for e in group)), "open")
        title = f"{source} to {target}, {health}: " + "; ".join(f"{e.name}, {e.loaded} tokens loaded" for e in group)
        path = _loop(places[source]) if source == target else _curve(places[source], places[target])
        width = 1.2 + 4 * loaded / most
        shape = tag("path", tag("title", title), d=path, class_=f"edge {health}", stroke_width=_n(width))
        lines.append(shape)
    for name, (x, y) in places.items():
        lines.append(tag("circle", tag("title", name), cx=_n(x), cy=_n(y), r=16, class_="node"))
        lines.append(tag("text", _short(name), x=_n(x), y=_n(y + 32), text_anchor="middle"))
    return _svg(lines, WIDTH, 2 * middle)


def _curve(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = start, end
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    bend = 0.12 * length
    mx, my = (x1 + x2) / 2 - dy * bend, (y1 + y2) / 2 + dx * bend
    return f"M{_n(x1 + 18 * dx)} {_n(y1 + 18 * dy)}Q{_n(mx)} {_n(my)} {_n(x2 - 20 * dx)} {_n(y2 - 20 * dy)}"


def _loop(at: tuple[float, float]) -> str:
    x, y = at
    return f"M{_n(x - 10)} {_n(y - 14)}C{_n(x - 40)} {_n(y - 60)} {_n(x + 40)} {_n(y - 60)} {_n(x + 10)} {_n(y - 14)}"


def _label(name: str, y: float) -> Markup:
    return tag("text", tag("title", name), _short(name), x=0, y=_n(y + 14))


def _short(name: str) -> str:
    return name if len(name) <= MAX_LABEL else name[: MAX_LABEL - 1] + "…"


def _bar(x: float, y: float, width: float, class_: str, title: str) -> Markup:
    if width <= 0:
        return Markup("")
    return tag("rect", tag("title", title), x=_n(x), y=_n(y), width=_n(max(width, 0.3)), height=BAR, class_=class_)


def _svg(lines: Iterable[Markup], width: float, height: float) -> Markup:
    return tag("svg", join(*lines), viewBox=f"0 0 {_n(width)} {_n(height)}", aria_hidden="true", class_="picture")


def _n(value: float) -> str:
    """A coordinate, short."""
    return f"{value:.1f}".removesuffix(".0")
