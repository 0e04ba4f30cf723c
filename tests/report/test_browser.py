"""The report and the live page in a real browser: no errors, the run's numbers, and everything by keyboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcomm_integrations.chat.request_log import RequestLog, RunRecord
from kvcomm_integrations.report.live import serve_live
from kvcomm_integrations.report.run_report import RunReport

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark"])
def tab(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page that fails the test on any error in its console and on any request to elsewhere."""
    faults: list[str] = []
    tab = browser.new_page(color_scheme=request.param, viewport={"width": 1100, "height": 900})
    tab.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on(
        "request",
        lambda made: None if made.url.startswith(("file://", "http://127.0.0.1", "data:")) else faults.append(made.url),
    )
    yield tab
    tab.close()
    assert faults == []


def test_report_renders(tab: Any, run: list[RunRecord], tmp_path: Path) -> None:
    tab.goto(RunReport(run).to_html(tmp_path / "report.html").as_uri())
    assert tab.title() == "KV reuse report"
    assert tab.locator("section").count() == 6
    assert "45" in tab.locator("#request-2").text_content()
    widths = tab.eval_on_selector_all("#request-2 rect.kind-loaded", "found => found.map(e => e.getBBox().width)")
    assert widths == [pytest.approx(0.45 * 900, abs=0.2)]
    fills = {
        kind: tab.eval_on_selector(f"#request-2 rect.kind-{kind}", "e => getComputedStyle(e).fill")
        for kind in ("exact", "loaded", "repaired", "computed")
    }
    assert len(set(fills.values())) == 4
    overflow = tab.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    assert not overflow


def test_report_fits_a_telephone(tab: Any, run: list[RunRecord], tmp_path: Path) -> None:
    tab.set_viewport_size({"width": 380, "height": 700})
    tab.goto(RunReport(run).to_html(tmp_path / "report.html").as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_keyboard_opens_a_prompt(tab: Any, run: list[RunRecord], tmp_path: Path) -> None:
    tab.goto(RunReport(run).to_html(tmp_path / "report.html").as_uri())
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    tab.locator("#request-2 > summary").focus()
    assert not tab.locator("#request-2 table").is_visible()
    tab.keyboard.press("Enter")
    assert tab.locator("#request-2 table").is_visible()
    outline = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_hostile_names_do_nothing(tab: Any, record: Any, tmp_path: Path) -> None:
    name = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"
    rows = [record(agent=name, source=name, session=name, texts=(name,) * 3, answer=name)]
    tab.goto(RunReport(rows, title=name).to_html(tmp_path / "report.html").as_uri())
    assert tab.evaluate("window.hit") is None
    assert name in tab.locator("#agents").text_content()


def test_live_page_updates_and_pauses(tab: Any, run: list[RunRecord]) -> None:
    log = RequestLog("models/small")
    with serve_live(lambda: log) as server:
        tab.goto(server.url)
        assert "No request" in tab.locator("main").text_content()
        for row in run:
            log.add(row)
        tab.wait_for_selector("#request-2", timeout=10_000)
        assert tab.locator("#state").text_content() == "0 running, 6 finished"
        tab.locator("#request-2 > summary").click()
        tab.locator("#pause").focus()
        tab.keyboard.press("Enter")
        assert tab.locator("#pause").text_content() == "Go on"
        log.add(run[0].model_copy(update={"number": 99}))
        tab.wait_for_timeout(2500)
        assert tab.locator("#request-99").count() == 0
        tab.keyboard.press("Enter")
        tab.wait_for_selector("#request-99", timeout=10_000)
        assert tab.locator("#request-2").get_attribute("open") is not None
