"""The middleware: whose request it is, what is written over, and what streams get added. Without vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.serve.middleware import KVCommMiddleware
from kvcomm_integrations.serve.names import HEADER_VARIABLE, KEYS_VARIABLE
from kvcomm_integrations.serve.tenants import read_keys
from kvcomm_integrations.wire import INFO_PATH, WIRE_KEY, WIRE_VERSION, KVCommParams

KEYS = {"key-a": "alice", "key-a2": "alice", "key-b": "bob"}


class Client:
    """Stands for vLLM's engine client."""

    def __init__(self) -> None:
        transfer = SimpleNamespace(kv_connector="KVCommConnector")
        parallel = SimpleNamespace(worker_extension_cls="x")
        self.vllm_config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)
        self.model_config = SimpleNamespace(tokenizer=str(Path(__file__).parent))
        self.closed = 0

    async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        return [{"disabled": "", "repair_refusal": None}]

    async def generate(self, number: int) -> AsyncIterator[Any]:
        try:
            yield SimpleNamespace(finished=False, kv_transfer_params=None)
            await asyncio.sleep(0.01)
            yield SimpleNamespace(finished=True, kv_transfer_params={WIRE_KEY: {"loaded": number}})
        finally:
            self.closed += 1


class App:
    """Stands for vLLM's application: notes bodies, streams what the engine gives."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(engine_client=Client())
        self.bodies: list[Any] = []
        self.raw: list[bytes] = []
        self.status = 200
        self.received: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            self.received.append("websocket")
            return
        raw = await Request(scope, receive).body()
        lengths = [v for k, v in scope["headers"] if k == b"content-length"]
        assert scope["method"] != "POST" or lengths == [str(len(raw)).encode()]
        self.raw.append(raw)
        body = json.loads(raw) if raw else {}
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        if not body.get("stream"):
            await send({"type": "http.response.body", "body": json.dumps({"path": scope["path"]}).encode()})
            return

        async def events() -> None:
            async with aclosing(self.state.engine_client.generate(body.get("number", 0))) as outputs:
                async for _ in outputs:
                    await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        await asyncio.create_task(events())  # as vLLM's handlers: in a task of their own


class Server:
    """The middleware around the application."""

    def __init__(self) -> None:
        self.app = App()
        self.middleware = KVCommMiddleware(self.app)

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        root_path: str = "",
        query: bytes = b"",
        **headers: str,
    ) -> tuple[int, bytes]:
        raw = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        given = {"content-type": "application/json", "content-length": str(len(raw))}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        scope = {
            "type": "http", "method": method, "path": path, "root_path": root_path, "query_string": query,
            "app": self.app,
            "headers": [(k.encode(), v.encode()) for k, v in given.items()],
        }  # fmt: skip
        half = len(raw) // 2
        pending = [
            {"type": "http.request", "body": raw[:half], "more_body": True},
            {"type": "http.request", "body": raw[half:]},
            {"type": "http.disconnect"},
        ]
        sent: list[Any] = []

        async def receive() -> Any:
            return pending.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        await self.middleware(scope, receive, send)
        return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])

    async def body_for(self, body: Any, **headers: str) -> dict[str, Any]:
        """What vLLM gets to see."""
        status, _ = await self.ask("POST", "/v1/completions", body, **headers)
        assert status == 200
        return self.app.bodies[-1]


def ours(tenant: str | None = None, **fields: Any) -> dict[str, Any]:
    params = {"agent": "x"} if tenant is None else {"agent": "x", "tenant": tenant}
    return {"prompt": [1], "kv_transfer_params": {WIRE_KEY: params}, **fields}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(KEYS))
    monkeypatch.setenv(KEYS_VARIABLE, str(path))
    return Server()


# ---- tenants ---------------------------------------------------------------------------------------------------------


async def test_a_key_decides_the_tenant_whatever_the_body_says(keyed: Server) -> None:
    plain = await keyed.body_for(ours(), **bearer("key-a"))
    same = await keyed.body_for(ours(), **bearer("key-a2"))
    other = await keyed.body_for(ours(), **bearer("key-b"))
    assert plain["cache_salt"] == same["cache_salt"] != other["cache_salt"]
    assert plain["kv_transfer_params"][WIRE_KEY]["tenant"] == "alice"
    assert other["kv_transfer_params"][WIRE_KEY]["tenant"] == "bob"


@pytest.mark.parametrize("said", ["bob", "default", "alice/bob", "bob\0", "", '["bob"]', "x" * 256])
async def test_no_body_reaches_another_tenant(keyed: Server, said: str) -> None:
    target = await keyed.body_for(ours(), **bearer("key-b"))
    intruder = await keyed.body_for(ours(said, cache_salt=target["cache_salt"]), **bearer("key-a"))
    assert intruder["cache_salt"] != target["cache_salt"]
    params = KVCommParams.model_validate(intruder["kv_transfer_params"][WIRE_KEY])
    assert params.tenant.startswith("alice")


async def test_a_body_divides_its_own_tenant_only(keyed: Server) -> None:
    first = await keyed.body_for(ours("user-1"), **bearer("key-a"))
    again = await keyed.body_for(ours("user-1"), **bearer("key-a2"))
    second = await keyed.body_for(ours("user-2"), **bearer("key-a"))
    foreign = await keyed.body_for(ours("user-1"), **bearer("key-b"))
    salts = [b["cache_salt"] for b in (first, again, second, foreign)]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3


async def test_a_clients_own_salt_still_separates(keyed: Server) -> None:
    one = await keyed.body_for(ours(cache_salt="1"), **bearer("key-a"))
    two = await keyed.body_for(ours(cache_salt="2"), **bearer("key-a"))
    assert one["cache_salt"] != two["cache_salt"]


async def test_plain_clients_get_the_salt_of_their_tenant(keyed: Server) -> None:
    mine = await keyed.body_for({"prompt": "hi"}, **bearer("key-a"))
    known = await keyed.body_for(ours(), **bearer("key-a"))
    assert mine == {"prompt": "hi", "cache_salt": known["cache_salt"]}


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"authorization": "Basic key-a"}, bearer(""), bearer("é")])
async def test_without_a_known_key_nothing_is_served(keyed: Server, headers: dict[str, str]) -> None:
    headers = {k: v for k, v in headers.items() if v.isascii()}
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", INFO_PATH)):
        status, answer = await keyed.ask(method, path, {"prompt": "x"}, **headers)
        assert status == 401
        assert "API key" in json.loads(answer)["error"]["message"]
    assert keyed.app.bodies == []


async def test_health_needs_no_key(keyed: Server) -> None:
    for path in ("/health", "/load", "/version"):
        assert (await keyed.ask("GET", path))[0] == 200


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/audio/transcriptions", "/v1/messages", "/pooling"])
async def test_endpoints_that_keep_no_tenants_apart_are_closed(keyed: Server, path: str) -> None:
    status, answer = await keyed.ask("POST", path, {"x": 1}, **bearer("key-a"))
    assert status == 403
    assert path in json.loads(answer)["error"]["message"]


async def test_websockets_are_closed_where_there_are_tenants(keyed: Server) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await keyed.middleware({"type": "websocket", "headers": []}, None, send)  # type: ignore[arg-type]
    assert sent[0]["type"] == "websocket.close"
    assert keyed.app.received == []


@pytest.mark.parametrize("raw", [b"{", b"[1]", b'"x"', b"\xff\xfe", b""])
async def test_bodies_that_cannot_be_read_are_refused(keyed: Server, raw: bytes) -> None:
    status, _ = await keyed.ask("POST", "/v1/completions", raw=raw, **bearer("key-a"))
    assert status == 400
    assert keyed.app.bodies == []


async def test_other_content_types_are_refused(keyed: Server) -> None:
    headers = {**bearer("key-a"), "content_type": "text/plain"}
    assert (await keyed.ask("POST", "/v1/completions", ours(), **headers))[0] == 400
    assert keyed.app.bodies == []


async def test_a_doubled_field_counts_once(keyed: Server) -> None:
    """JSON may name a field twice; what vLLM gets names it once."""
    raw = b'{"prompt": [1], "cache_salt": "x", "cache_salt": "y"}'
    await keyed.ask("POST", "/v1/completions", raw=raw, **bearer("key-a"))
    assert keyed.app.raw[-1].count(b"cache_salt") == 1


async def test_a_trusted_header_names_the_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEADER_VARIABLE, "X-Tenant")
    server = Server()
    a = await server.body_for(ours("b"), x_tenant="a")
    b = await server.body_for(ours(), x_tenant="b")
    assert a["kv_transfer_params"][WIRE_KEY]["tenant"].startswith("a/")
    assert a["cache_salt"] != b["cache_salt"]
    for name in ("", "a/b", "x" * 65, "a b"):
        headers = {"x_tenant": name} if name else {}
        assert (await server.ask("POST", "/v1/completions", ours(), **headers))[0] == 401
    assert (await server.ask("GET", "/v1/models"))[0] == 200


async def test_without_tenants_bodies_pass_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    raw = b'{"prompt":  [1]}'
    await server.ask("POST", "/v1/completions", raw=raw)
    assert server.app.raw == [raw]
    body = ours("anyone", cache_salt="s")
    assert await server.body_for(body) == body


def test_settings_that_cannot_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.json"
    for text in ("", "[]", "{}", '{"secret-key": "a/b"}', '{"secret-key": 5}', '{" ": "a"}'):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=r"keys\.json") as caught:
            read_keys(path)
        assert "secret-key" not in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"missing\.json"):
        read_keys(tmp_path / "missing.json")
    monkeypatch.setenv(KEYS_VARIABLE, str(path))
    monkeypatch.setenv(HEADER_VARIABLE, "X-Tenant")
    with pytest.raises(ConfigurationError, match="not from both"):
        KVCommMiddleware(App())


# ---- reports and information -----------------------------------------------------------------------------------------


async def test_a_stream_ends_with_its_own_report() -> None:
    server = Server()
    answers = await asyncio.gather(
        *(server.ask("POST", "/v1/completions", ours(stream=True, number=n)) for n in range(20))
    )
    for number, (_, content) in enumerate(answers):
        events = [e.removeprefix("data: ") for e in content.decode().split("\n\n") if e]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["kv_transfer_params"] == {WIRE_KEY: {"loaded": number}}
    assert server.app.state.engine_client.closed == 20


async def test_streams_of_plain_clients_are_left_alone() -> None:
    server = Server()
    _, content = await server.ask("POST", "/v1/completions", {"prompt": "x", "stream": True})
    assert content == b"data: {}\n\ndata: {}\n\ndata: [DONE]\n\n"


async def test_what_the_server_says_of_itself(keyed: Server) -> None:
    status, answer = await keyed.ask("GET", INFO_PATH, **bearer("key-a"))
    info = json.loads(answer)
    assert status == 200
    assert (info["wire"], info["connector"], info["tenants"]) == (WIRE_VERSION, True, "keys")


async def test_who_may_not_list_models_gets_no_information() -> None:
    """vLLM's own keys are checked behind the middleware."""
    server = Server()
    server.app.status = 401
    assert (await server.ask("GET", INFO_PATH))[0] == 401
