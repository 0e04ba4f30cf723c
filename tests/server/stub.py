"""A server that behaves like vLLM's, well or badly, as a test wants it. Real sockets, no model."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import INFO_PATH, WIRE_KEY, WIRE_VERSION

MODEL = "served"


@dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Stub:
    """What the server does, and what it has seen."""

    tokenizer: ChatTokenizer
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": MODEL, "root": "/m", "max_model_len": 512}])
    info: dict[str, Any] | None = field(
        default_factory=lambda: {"version": "0", "wire": WIRE_VERSION, "connector": True, "refusal": ""}
    )
    connector: bool = False
    """Our connector without our middleware: answers in one piece carry reports, streams do not."""
    key: str = ""
    answer: str = "The answer is six."
    status: int = 200
    """Status of completions."""
    error: Any = None
    """What a bad status says."""
    events: Callable[[Stub, dict[str, Any]], Iterator[str]] | None = None
    """Makes the stream's data; an empty string breaks the connection off."""
    reset_first: int = 0
    """Connections to break before answering anything."""
    pause: float = 0.0
    """Seconds before each event."""
    seen: list[Seen] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a client has left in the middle of a stream."""
    url: str = ""

    def completions(self) -> list[Seen]:
        return [s for s in self.seen if s.path == "/v1/completions" and s.body.get("stream")]


def well(stub: Stub, body: dict[str, Any]) -> Iterator[str]:
    """Events of a good answer, a token each."""
    ids = stub.tokenizer.encode(stub.answer, allow_special=False)[: body["max_tokens"]]
    for number, token in enumerate(ids):
        last = number == len(ids) - 1
        choice: dict[str, Any] = {"index": 0, "text": stub.tokenizer.decode([token]), "token_ids": [token]}
        choice |= {"finish_reason": "stop" if last else None, "stop_reason": None}
        if "logprobs" in body:
            top = {f"token_id:{token}": -0.5, f"token_id:{token + 1}": -0.2}
            choice["logprobs"] = {"tokens": [f"token_id:{token}"], "token_logprobs": [-0.5], "top_logprobs": [top]}
        yield json.dumps({"id": "cmpl-1", "choices": [choice]})
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids), "prompt_tokens_details": None}
    yield json.dumps({"id": "cmpl-1", "choices": [], "usage": usage})
    if stub.info is not None and stub.info["connector"]:
        report = {"prompt_tokens": len(body["prompt"]), "exact": 1, "loaded": 2, "repaired": 3, "computed": 4}
        yield json.dumps({"choices": [], "kv_transfer_params": {WIRE_KEY: report}})
    yield "[DONE]"


def _handler(stub: Stub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            self._note({})
            if self._refuses():
                return
            if self.path == "/v1/models":
                self._json(200, {"data": stub.models})
            elif self.path == "/health":
                self._json(200, {})
            elif self.path == INFO_PATH and stub.info is not None:
                self._json(200, stub.info)
            else:
                self._json(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._note(body)
            if self._refuses():
                return
            if self.path == "/tokenize":
                self._json(200, {"tokens": stub.tokenizer.encode(body["prompt"], allow_special=False)})
            elif self.path != "/v1/completions":
                self._json(404, {"detail": "Not Found"})
            elif stub.status != 200:
                self._json(stub.status, stub.error)
            elif body.get("stream"):
                self._stream((stub.events or well)(stub, body))
            else:
                report = {WIRE_KEY: {"prompt_tokens": 1}} if stub.connector else None
                self._json(200, {"choices": [{"text": "x"}], "kv_transfer_params": report})

        def _note(self, body: dict[str, Any]) -> None:
            stub.seen.append(Seen(self.path, {k.lower(): v for k, v in self.headers.items()}, body))

        def _refuses(self) -> bool:
            if stub.reset_first > 0:
                stub.reset_first -= 1
                self._break_off()
                return True
            if stub.key and self.headers.get("Authorization") != f"Bearer {stub.key}":
                self._json(401, {"error": "Unauthorized"})
                return True
            return False

        def _break_off(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

        def _json(self, status: int, content: Any) -> None:
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, events: Iterator[str]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for event in events:
                    time.sleep(stub.pause)
                    if not event:
                        self._break_off()
                        return
                    self._chunk(f"data: {event}\n\n".encode())
                self._chunk(b"")
            except OSError:
                stub.left.set()
                self.close_connection = True

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._connections: list[socket.socket] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.append(request)
        super().process_request(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave are what some tests are about."""


@contextmanager
def running(stub: Stub) -> Iterator[Stub]:
    """The stub as a server on a free port."""
    server = _Server(("127.0.0.1", 0), _handler(stub))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
