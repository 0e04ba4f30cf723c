"""Every verdict on an edge has its place in figures, drawing, page and terminal, and none of them crashes a client."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from rich.console import Console

from kvcomm_integrations.chat.request_log import RunRecord
from kvcomm_integrations.report.drawing import agent_graph
from kvcomm_integrations.report.figures import EdgeFigures, edges
from kvcomm_integrations.report.live import Snapshot
from kvcomm_integrations.report.markup import asset
from kvcomm_integrations.report.run_report import RunReport
from kvcomm_integrations.report.top import view
from kvcomm_integrations.wire import EdgeReport, Health, RequestReport


@pytest.fixture(params=list(Health))
def health(request: pytest.FixtureRequest) -> Health:
    return Health(request.param)


@pytest.fixture
def judged(record: Callable[..., RunRecord], health: Health) -> RunRecord:
    """A request over an edge of that health."""
    row = record()
    fixed, shared, rest = row.segments
    assert shared.edge is not None
    shared = shared.model_copy(update={"edge": shared.edge.model_copy(update={"health": health})})
    return row.model_copy(update={"segments": (fixed, shared, rest)})


def test_figures(judged: RunRecord, health: Health) -> None:
    (edge,) = edges([judged])
    assert edge.health is health


def test_drawing(judged: RunRecord, health: Health) -> None:
    (arrow,) = agent_graph(edges([judged])).arrows
    assert arrow.health is health and f"planner to solver, {health}: " in arrow.title


def test_the_worst_health_is_drawn(health: Health) -> None:
    worse = list(Health)[list(Health).index(health) :]
    for other in worse:
        pair = [EdgeFigures("a", "b", "x", health=other), EdgeFigures("a", "b", "y", health=health)]
        (arrow,) = agent_graph(pair).arrows
        assert arrow.health is other


def test_page(judged: RunRecord, health: Health) -> None:
    page = RunReport([judged]).html()
    arrows = re.findall(r'class="edge (\w+)" stroke-width="[0-9.]+"><title>', page)
    assert arrows == [health]
    legend = re.findall(r'class="edge (\w+)".*\n?.*<b>(\w+)</b> \(', page)
    assert [name for _, name in legend] == list(Health)
    assert f"<td>{health}</td>" in page
    assert health is Health.OPEN or f".edge.{health} {{" in asset("style.css")
    assert page.count('class="core"') == (2 if health is Health.PROVEN else 1)


def test_terminal(judged: RunRecord, health: Health) -> None:
    console = Console(width=140, record=True)
    console.print(view(Snapshot(model="m", running=(), records=(judged,))))
    assert f" {health} " in console.export_text()


def test_json_is_a_word_and_comes_back(judged: RunRecord, health: Health) -> None:
    dumped = judged.model_dump(mode="json")
    assert dumped["segments"][1]["edge"]["health"] == health.value
    assert RunRecord.model_validate(dumped) == judged


def test_a_health_of_a_newer_server_is_read_as_open() -> None:
    told = {"segments": [{"kind": "placeholder", "name": "n", "start": 0, "end": 9, "loaded": 9}]}
    told["segments"][0]["edge"] = {"source": "a", "target": "b", "name": "n", "health": "glowing", "why": "new"}
    report = RequestReport.from_transfer_params({"kvcomm": told})
    assert report is not None and report.segments[0].edge == EdgeReport(source="a", target="b", name="n", why="new")
    with pytest.raises(ValueError, match="health"):
        EdgeReport.model_validate({"source": "a", "target": "b", "name": "n", "health": 3})
