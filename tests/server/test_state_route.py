"""The operator's routes for learned corrections, behind a real socket and a stand-in for vLLM's engine client."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcomm_integrations import cli
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.serve.middleware import KVCommMiddleware
from kvcomm_integrations.serve.names import FOLDER_VARIABLE, KEY_VARIABLE
from kvcomm_integrations.serve.operator_key import OperatorKey
from kvcomm_integrations.serve.state_routes import StateRoutes

KEY = "the operator's own key"


class Workers:
    """Two workers that note what they are told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error = ""

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, *args))
        answer = {"error": self.error} if self.error else {"share": str(args[0]), "edges": 3, "examples": 12}
        return [answer, answer]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    return tmp_path


async def ask(
    workers: Workers, path: str, body: Any = None, *, key: str = KEY, method: str = "POST"
) -> tuple[int, dict[str, Any]]:
    """One request through the middleware; a request that passes it is answered with 418."""
    sent: list[Any] = []

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body or {}).encode(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    app = SimpleNamespace(state=SimpleNamespace(engine_client=workers))
    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "app": app}
    await KVCommMiddleware(vllm)(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def test_orders_reach_every_worker(folder: Path) -> None:
    workers = Workers()
    assert await ask(workers, "/kvcomm/state/save", {"name": "a"}) == (200, {"edges": 3, "examples": 12})
    assert await ask(workers, "/kvcomm/state/load", {"name": "a", "tenant": "acme", "merge": True}) == (
        200,
        {"edges": 3, "examples": 12},
    )
    assert (await ask(workers, "/kvcomm/state/clear", {"tenant": "acme"}))[0] == 200
    assert workers.calls == [
        ("kvcomm_save_state", str(folder / "a"), None),
        ("kvcomm_load_state", str(folder / "a"), "acme"),
        ("kvcomm_apply_state", True),
        ("kvcomm_clear_state", "acme"),
    ]


@pytest.mark.parametrize("name", ["", "../a", "/etc/passwd", "a/b", ".hidden", "a\n", "x" * 129])
async def test_clients_name_files_not_paths(folder: Path, name: str) -> None:
    workers = Workers()
    status, told = await ask(workers, "/kvcomm/state/save", {"name": name})
    assert (status, workers.calls) == (400, [])
    assert "not a name for a state file" in told["error"]["message"]


async def test_only_the_operator_gives_orders(folder: Path) -> None:
    workers = Workers()
    for key in ("", "another key of somebody", KEY + "x"):
        assert (await ask(workers, "/kvcomm/state/clear", key=key))[0] == 401
    assert (await ask(workers, "/kvcomm/state/steal"))[0] == 404
    assert (await ask(workers, "/kvcomm/state/save", method="GET"))[0] == 404
    assert (await ask(workers, "/kvcomm/state/save", {"nam": "a"}))[0] == 400
    assert workers.calls == []
    workers.error = "learned on another model: it has dtype 'float16', not 'float32'"
    assert await ask(workers, "/kvcomm/state/load", {"name": "a"}) == (
        400,
        {"error": {"message": workers.error, "type": "invalid_request_error", "code": 400}},
    )


async def test_without_a_folder_there_is_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    workers = Workers()
    assert (await ask(workers, "/kvcomm/state/clear"))[0] == 418
    assert workers.calls == []


def test_bad_settings_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "missing"))
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with pytest.raises(ConfigurationError, match="is not a folder"):
        StateRoutes(OperatorKey.from_environment())
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ConfigurationError, match="at least 16 characters"):
        StateRoutes(OperatorKey.from_environment())


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    """Answers orders; one for a file named ``bad`` is refused."""
    seen: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append((self.path, body, self.headers["authorization"]))
            status = 400 if body.get("name") == "bad" else 200 if "/state/" in self.path else 404
            told = {"edges": 2, "examples": 7} if status == 200 else {"error": {"message": "it is truncated"}}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listener.server_address[1]}", seen
    listener.shutdown()
    listener.server_close()


def test_the_command_line_gives_orders(
    server: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, seen = server
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert cli.main(["state", "save", "a", "--server", url + "/v1"]) == 0
    assert cli.main(["state", "load", "a", "--server", url, "--merge", "--tenant", "acme"]) == 0
    assert cli.main(["state", "clear", "--server", url]) == 0
    assert capsys.readouterr().out == "a: 2 edges, 7 examples\n" * 2 + "2 edges forgotten\n"
    assert seen == [
        ("/kvcomm/state/save", {"name": "a", "tenant": None}, f"Bearer {KEY}"),
        ("/kvcomm/state/load", {"name": "a", "tenant": "acme", "merge": True}, f"Bearer {KEY}"),
        ("/kvcomm/state/clear", {"tenant": None}, f"Bearer {KEY}"),
    ]
    assert cli.main(["state", "load", "bad", "--server", url]) == 2
    assert capsys.readouterr().err == "kvcomm: it is truncated\n"
    assert cli.main(["state", "clear", "--server", "http://127.0.0.1:1"]) == 2
    assert "no answer from http://127.0.0.1:1" in capsys.readouterr().err
    monkeypatch.delenv(KEY_VARIABLE)
    assert cli.main(["state", "clear", "--server", url]) == 2
    assert "set KVCOMM_ADMIN_KEY" in capsys.readouterr().err
    assert KEY_VARIABLE not in os.environ
