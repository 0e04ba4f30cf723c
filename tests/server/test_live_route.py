"""A server's live page: off by default, for its own machine, and filled by every finished request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvcomm_integrations.serve.live_page import PLAIN
from kvcomm_integrations.serve.middleware import KVCommMiddleware
from kvcomm_integrations.serve.names import LIVE_VARIABLE
from kvcomm_integrations.wire import RequestReport


class Client:
    """Stands in for vLLM's engine client: two outputs for each request."""

    def __init__(self) -> None:
        self.params: Any = None

    async def generate(self, *args: Any) -> AsyncIterator[Any]:
        times = SimpleNamespace(queued_ts=1.0, scheduled_ts=1.002, num_generation_tokens=2)
        for finished in (False, True):
            part = SimpleNamespace(token_ids=[5], finish_reason="stop" if finished else None)
            yield SimpleNamespace(
                outputs=[part],
                finished=finished,
                kv_transfer_params=self.params if finished else None,
                prompt_token_ids=[1] * 40,
                num_cached_tokens=16,
                metrics=times,
            )


class Server:
    """The middleware before an application that answers every POST with the engine's tokens."""

    def __init__(self) -> None:
        self.client = Client()
        self.middleware = KVCommMiddleware(self._vllm)

    async def _vllm(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            async for _ in self.client.generate():
                pass
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ask(self, method: str, path: str, client: str = "127.0.0.1", **headers: str) -> tuple[int, bytes]:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        named = {"host": "127.0.0.1:8000", **{name.replace("_", "-"): value for name, value in headers.items()}}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "client": (client, 1),
            "headers": [(name.encode(), value.encode()) for name, value in named.items()],
            "app": SimpleNamespace(state=SimpleNamespace(engine_client=self.client)),
        }
        await self.middleware(scope, receive, send)
        return sent[0]["status"], sent[1]["body"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv(LIVE_VARIABLE, "1")
    return Server()


async def test_off_by_default() -> None:
    server = Server()
    await server.ask("POST", "/v1/completions")
    assert (await server.ask("GET", "/kvcomm"))[0] == 418
    assert server.middleware._live.log.records() == []


async def test_every_request_is_shown(server: Server) -> None:
    report = RequestReport(agent="critic", session="s", prompt_tokens=40, exact=16, loaded=20, computed=4)
    await server.ask("POST", "/v1/completions")
    server.client.params = {"kvcomm": report.model_dump(mode="json")}
    await server.ask("POST", "/v1/completions")
    status, body = await server.ask("GET", "/kvcomm/data")
    plain, ours = json.loads(body)["records"]
    assert status == 200
    assert (plain["agent"], plain["exact"], plain["computed"]) == (PLAIN, 16, 24)
    assert (ours["agent"], ours["loaded"], ours["completion_tokens"], ours["number"]) == ("critic", 20, 2, 2)
    assert ours["queue_ms"] == pytest.approx(2.0) and ours["total_ms"] >= ours["ttft_ms"]
    assert b"critic" in (await server.ask("GET", "/kvcomm"))[1]


async def test_only_the_servers_own_machine(server: Server) -> None:
    assert (await server.ask("GET", "/kvcomm", client="203.0.113.9"))[0] == 403
    assert (await server.ask("GET", "/kvcomm", host="gpu.example"))[0] == 403
    assert (await server.ask("GET", "/kvcomm", x_forwarded_for="203.0.113.9"))[0] == 403
    assert (await server.ask("POST", "/kvcomm"))[0] == 405
