"""The live page and ``kvcomm top``: the run's numbers, for this machine only, and nothing to change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvcomm_integrations import cli
from kvcomm_integrations.chat.request_log import RequestLog, RunRecord
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.report.live import LiveServer, asgi_app, serve_live


@pytest.fixture
def log(run: list[RunRecord]) -> RequestLog:
    log = RequestLog("models/small")
    for row in run:
        log.add(row)
    return log


@pytest.fixture
def server(log: RequestLog) -> Iterator[LiveServer]:
    with serve_live(lambda: log) as server:
        yield server


def test_page_panels_and_data(server: LiveServer, run: list[RunRecord]) -> None:
    page = httpx.get(server.url)
    assert page.status_code == 200 and "0 running, 6 finished" in page.text and "<script>" in page.text
    assert page.headers["x-frame-options"] == "DENY" and page.headers["cache-control"] == "no-store"
    assert "maturing edge" in httpx.get(f"{server.url}/panels").text
    data = httpx.get(f"{server.url}/data").json()
    assert [row["number"] for row in data["records"]] == [row.number for row in run]
    assert httpx.head(server.url).content == b""


def test_nothing_else_and_nothing_to_change(server: LiveServer) -> None:
    assert httpx.get(server.url.removesuffix("/kvcomm") + "/etc/passwd").status_code == 404
    assert httpx.post(server.url).status_code == 405
    assert httpx.get(server.url, headers={"host": "evil.example"}).status_code == 403


def test_other_machines_are_refused() -> None:
    for host in ("0.0.0.0", "192.0.2.1", "example.org"):
        with pytest.raises(ConfigurationError, match="loopback"):
            serve_live(lambda: RequestLog(), host=host)


def test_a_taken_port_is_named(server: LiveServer) -> None:
    port = int(server.url.split(":")[2].split("/")[0])
    with pytest.raises(ConfigurationError, match=f"port {port}"):
        serve_live(lambda: RequestLog(), port=port)


@pytest.mark.parametrize(
    ("client", "host", "remote", "status"),
    [
        ("127.0.0.1", "localhost:8000", False, 200),
        ("::1", "[::1]:8000", False, 200),
        ("127.0.0.1", "evil.example", False, 403),
        ("203.0.113.9", "localhost", False, 403),
        ("203.0.113.9", "gpu.example", True, 200),
    ],
)
def test_inside_another_server(log: RequestLog, client: str, host: str, remote: bool, status: int) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/kvcomm",
        "headers": [(b"host", host.encode())],
        "client": (client, 1),
    }
    asyncio.run(asgi_app(lambda: log, allow_remote=remote)(scope, receive, send))
    assert sent[0]["status"] == status
    assert (b"0 running" in sent[1]["body"]) == (status == 200)


def test_top_prints_the_numbers(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", server.url, "--once"]) == 0
    out = capsys.readouterr().out
    assert "0 running, 6 finished" in out and "planner" in out and "EngineError" in out


def test_top_says_when_nothing_answers(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.close()
    assert cli.main(["top", server.url, "--once"]) == 2
    assert "does not answer" in capsys.readouterr().err
