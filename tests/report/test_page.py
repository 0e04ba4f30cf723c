"""The page: it shows the run's numbers, holds together without colour or script, and obeys no name."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest
from jinja2 import UndefinedError

from kvcomm_integrations.chat.request_log import RunRecord
from kvcomm_integrations.report.figures import AgentFigures, by_agent, edges, sessions, totals
from kvcomm_integrations.report.markup import asset, render
from kvcomm_integrations.report.page import SECTIONS, live_page
from kvcomm_integrations.report.run_report import RunReport

HOSTILE = "<script>alert('x')</script>\"' onload=x \x1b[31m \ud800 \u202e"


class Reader(HTMLParser):
    """Collects elements and their attributes, and checks that all are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


def test_every_panel_is_there_and_labelled(run: list[RunRecord]) -> None:
    page = RunReport(run).html()
    reader = read(page)
    ids = [attrs["id"] for _, attrs in reader.elements if attrs.get("id")]
    assert len(ids) == len(set(ids))
    assert set(SECTIONS) <= set(ids)
    targets = [str(attrs["href"])[1:] for name, attrs in reader.elements if name == "a"]
    assert set(targets) <= set(ids)
    for name, attrs in reader.elements:
        if name == "section":
            assert attrs["aria-labelledby"] in ids
        if name == "svg":
            assert attrs["aria-hidden"] == "true"
    assert [name for name, _ in reader.elements].count("h1") == 1
    assert page.count("<caption>") == page.count("<table>")


def test_the_page_shows_the_runs_numbers(run: list[RunRecord]) -> None:
    page = RunReport(run).html()
    sums = totals(run)
    assert sums.requests == 5 and f"<dd>{sums.skipped} (" in page
    assert "request 2" in page and "45 loaded" in page and "maturing edge, 3 examples" in page
    solver = next(agent for agent in by_agent(run) if agent.name == "solver")
    assert solver.speedup == pytest.approx(3.0) and ">3.00<" in page
    first, second, *_ = edges(run)
    assert (first.source, first.target, second.source) == ("planner", "solver", "solver")
    assert first.divergence == 0.125 and "0.125 nats" in page
    assert "1 of 5 requests ran densely as audits" in page
    assert "ended with EngineError" in page


def test_a_dense_session_goes_with_its_like(record: Callable[..., RunRecord]) -> None:
    dense = {"asked": "dense", "tenant": "dense"}
    rows = [
        record(number=1, session="w", asked="observe", started=1.0),
        record(number=2, session="d1", started=2.0, **dense),
        record(number=3, session="r1", started=3.0),
        record(number=4, session="d2", started=4.0, **dense),
        record(number=5, session="r2", started=5.0),
        record(number=6, session="d3", started=6.0, agent="critic", **dense),
    ]
    found = [(runs.session, [row.session for row in runs.dense]) for runs in sessions(rows)]
    assert found == [("w", []), ("r1", ["d1"]), ("r2", ["d2"]), ("d3", [])]
    assert RunReport(rows).html().count("beside the same densely") == 2


def test_nothing_comes_from_elsewhere_and_nothing_runs(run: list[RunRecord]) -> None:
    page = RunReport(run).html()
    assert "<script" not in page and "http" not in re.sub(r"http-equiv", "", page)
    (policy,) = [a["content"] for _, a in read(page).elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "script-src" not in policy and "connect-src" not in policy
    assert len(page.encode()) < 100_000


def test_the_policy_allows_what_the_page_holds(run: list[RunRecord]) -> None:
    page = live_page(run, "live", 0)
    (policy,) = [a["content"] for _, a in read(page).elements if a.get("http-equiv") == "Content-Security-Policy"]
    for element in ("style", "script"):
        (held,) = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(held.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in str(policy)


@pytest.mark.parametrize("field", ["agent", "session", "model", "tenant", "reason", "error", "finish_reason"])
def test_a_hostile_name_is_harmless(field: str, record: Callable[..., RunRecord]) -> None:
    rows = [record(**{field: HOSTILE}), record(source=HOSTILE, texts=(HOSTILE,) * 3, answer=HOSTILE)]
    page = RunReport(rows, title=HOSTILE).html()
    reader = read(page)
    assert "script" not in {name for name, _ in reader.elements}
    assert not [attrs for _, attrs in reader.elements if any(key.startswith("on") for key in attrs)]
    assert "\x1b" not in page and "\u202e" not in page
    page.encode("utf-8")


def test_an_empty_run_has_a_page_too() -> None:
    assert "No request has finished yet." in RunReport([]).html()
    read(live_page([], "live", 0))


def test_light_and_dark_have_contrast() -> None:
    """Text against its background, by WCAG's formula: 4.5 for text, 3 for parts of pictures."""
    style = asset("style.css")
    themes = [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{([^}]*)\}", style)]
    assert len(themes) == 2
    for theme in themes:
        for ink in ("ink", "quiet", "link"):
            for ground in ("paper", "panel"):
                assert contrast(theme[ink], theme[ground]) >= 4.5, (ink, ground)
        for kind in ("exact", "loaded", "repaired", "computed", "queue", "plan", "load", "repair", "compute", "decode"):
            assert contrast(theme[kind], theme["paper"]) >= 3, kind


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_templates_escape_attributes_and_text() -> None:
    agent = AgentFigures('<b> "x" \x1b', 0, None, None, {}, {}, {"prompt": 0.0})
    shown = render("agent_table.html", agents=[agent])
    assert '<th scope="row">&lt;b&gt; &#34;x&#34; \u241b</th><td class="number">0</td>' in shown
    with pytest.raises(UndefinedError):
        render("agent_table.html")
