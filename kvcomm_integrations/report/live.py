"""The live page: the report's panels while an engine works. Read-only, for this machine alone unless told otherwise.

``respond`` makes the answers; ``serve_live`` puts it behind a small server of its own, ``asgi_app`` into another one.
"""

from __future__ import annotations

import ipaddress
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import BaseModel

from kvcomm_integrations.chat.request_log import RequestLog, RunRecord
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.forks import watch
from kvcomm_integrations.report.page import live_page, live_panels

PATH = "/kvcomm"
"""Where the page lives; ``/kvcomm/panels`` and ``/kvcomm/data`` belong to it."""
TITLE = "KV reuse, live"

Source = Callable[[], RequestLog]
"""Gives the log to show, at each request."""
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Snapshot(BaseModel):
    """What an engine says of its requests at ``/kvcomm/data``."""

    model: str
    running: tuple[RunRecord, ...]
    records: tuple[RunRecord, ...]


class Response:
    """An answer over HTTP: never stored, never framed, its type never guessed at."""

    def __init__(self, status: int, kind: str, text: str) -> None:
        self.status = status
        self.body = text.encode()
        self.headers = {
            "content-type": f"{kind}; charset=utf-8",
            "content-length": str(len(self.body)),
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
        }


REFUSED = Response(403, "text/plain", "this page is for the server's own machine, by the name localhost\n")


def respond(log: RequestLog, method: str, path: str) -> Response:
    """Answer one request.

    Args:
        log: the requests to show.
        method: only ``GET`` and ``HEAD`` are answered: the page changes nothing.
        path: ``/kvcomm`` (the page), ``/kvcomm/panels`` (what the page's script fetches) or ``/kvcomm/data`` (JSON).
    """
    if method not in ("GET", "HEAD"):
        return Response(405, "text/plain", "read-only: use GET\n")
    records, running, path = log.records(), log.running(), path.partition("?")[0].rstrip("/")
    if path == PATH:
        return Response(200, "text/html", live_page(records, TITLE, len(running)))
    if path == f"{PATH}/panels":
        return Response(200, "text/html", live_panels(records, len(running)))
    if path == f"{PATH}/data":
        now = Snapshot(model=log.model, running=tuple(running), records=tuple(records))
        return Response(200, "application/json", json.dumps(now.model_dump(mode="json")))
    return Response(404, "text/plain", f"nothing here; the page is at {PATH}\n")


class LiveServer:
    """A small server with the live page, in a thread of its own. Use ``serve_live`` to make one."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self._forked = False
        watch(self)
        self._thread = threading.Thread(target=server.serve_forever, name="kvcomm-live", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the page."""
        host, port = self._server.server_address[:2]
        host = host.decode() if isinstance(host, bytes) else str(host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"

    def after_fork(self) -> None:
        """The page is the parent's: a forked child only lets go of the port."""
        self._forked = True
        self._server.socket.close()

    def close(self) -> None:
        """Stop serving. Idempotent; does nothing in a forked child."""
        if self._forked:
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LiveServer({self.url})"


def serve_live(source: Source, *, port: int = 0, host: str = "127.0.0.1") -> LiveServer:
    """Serve the live page until the returned server is closed or the process ends.

    Args:
        source: gives the log to show.
        port: TCP port; 0 takes a free one.
        host: a loopback address. The page has no password, so it is not served to other machines.

    Raises:
        ConfigurationError: the address is not a loopback address, or the port is taken.
    """
    if not _is_loopback(host):
        raise ConfigurationError(
            f"host={host!r} is not a loopback address, and the live page has no password; use 127.0.0.1 and reach it "
            "from elsewhere through a tunnel (ssh -L)"
        )
    try:
        return LiveServer(ThreadingHTTPServer((host, port), _handler(source)))
    except OSError as err:
        raise ConfigurationError(f"port {port} on {host} cannot be used: {err.strerror or err}; use port=0") from err


def _handler(source: Source) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "kvcomm"
        sys_version = ""

        def do_GET(self) -> None:
            local = _is_local_name(self.headers.get("host", ""))
            answer = respond(source(), self.command, self.path) if local else REFUSED
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a page that fetches every two seconds would fill the terminal."""

    return Handler


def asgi_app(
    source: Source, *, allow_remote: bool = False
) -> Callable[[Mapping[str, Any], Receive, Send], Awaitable[None]]:
    """The live page as an ASGI application, to be mounted in a server at any place that keeps the path ``/kvcomm``.

    Args:
        source: gives the log to show.
        allow_remote: answer other machines too. The page has no password of its own.
    """

    async def app(scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        client = (scope.get("client") or ("",))[0]
        local = allow_remote or (_is_loopback(client) and _is_local_name(host))
        answer = respond(source(), scope["method"], scope["path"]) if local else REFUSED
        headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body if scope["method"] != "HEAD" else b""})

    return app


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_local_name(header: str) -> bool:
    """The ``Host`` header names this machine: a page elsewhere cannot read ours by pointing its own name at us."""
    name = header.partition("]")[0].removeprefix("[") if header.startswith("[") else header.partition(":")[0]
    return _is_loopback(name)
