"""The few pieces of the ASGI protocol that the middleware needs."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def header(scope: Scope, name: str) -> str:
    """A request's header, empty if it is missing. ``name`` in any case."""
    wanted = name.lower().encode("latin-1")
    return next((value.decode("latin-1") for key, value in scope["headers"] if key.lower() == wanted), "")


def route(scope: Scope) -> str:
    """A request's path within the application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request; what has come so far if the client leaves."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            break
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    return b"".join(parts)


def with_body(scope: Scope, receive: Receive, body: bytes) -> tuple[Scope, Receive]:
    """The request with another body; whatever comes after the body (a disconnect) is still received."""
    rest = [(key, value) for key, value in scope["headers"] if key.lower() != b"content-length"]
    headers = [*rest, (b"content-length", str(len(body)).encode())]
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> Message:
        return pending.pop() if pending else await receive()

    return {**scope, "headers": headers}, receive_body


async def send_json(send: Send, status: int, content: Any) -> None:
    """Answer with JSON."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, status: int, message: str) -> None:
    """Answer with an error in OpenAI's form."""
    await send_json(send, status, {"error": {"message": message, "type": "invalid_request_error", "code": status}})


def with_route(scope: Scope, path: str) -> Scope:
    """The request with another path within the application."""
    root = scope["path"].removesuffix(route(scope))
    return {**scope, "path": root + path, "raw_path": quote(root + path).encode()}
