"""``kvcomm serve``: start, tell, wait, stop."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
from types import FrameType
from typing import Any

import httpx

from kvcomm_integrations.errors import EngineError, UnsupportedModelError
from kvcomm_integrations.report.live import PATH
from kvcomm_integrations.serve.arguments import Launch, launch
from kvcomm_integrations.serve.supervisor import Supervisor
from kvcomm_integrations.wire import INFO_PATH, ServerInfo

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until asked to stop; returns the exit status."""
    found = launch(
        args.model,
        args.vllm_options,
        reuse=args.reuse,
        tenant_keys=args.tenant_keys,
        tenant_header=args.tenant_header,
        live=args.live,
    )
    output = _Output(args.verbose)
    server = Supervisor(found, output.show)

    def stop(number: int, frame: FrameType | None) -> None:
        server.stop()

    previous = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        print(f"kvcomm: starting vLLM with {args.model} ...", file=sys.stderr, flush=True)
        try:
            server.start(args.start_timeout)
        except EngineError as error:
            raise EngineError(f"{error} (whole log: {output.write()})") from error
        if server.stopped:
            return 0
        _check_reuse(found, args, server)
        print(f"kvcomm: serving {args.model} at {found.url}/v1", file=sys.stderr, flush=True)
        if args.live:
            print(f"kvcomm: live page at {found.url}{PATH} (from this machine)", file=sys.stderr, flush=True)
        output.open()
        status = server.wait()
        if status:
            print(f"kvcomm: the server ended by itself with status {status}; see its log above", file=sys.stderr)
        return status
    finally:
        server.end()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _check_reuse(found: Launch, args: argparse.Namespace, server: Supervisor) -> None:
    """A server that can reuse nothing is not what ``kvcomm serve`` is for, unless the user says so.

    Raises:
        UnsupportedModelError: the model's KV cannot be reused. The server has been stopped.
    """
    info = _info(found)
    if info is None or not info.refusal or args.allow_dense:
        return
    server.end()
    raise UnsupportedModelError(
        f"KV of {args.model!r} cannot be reused: {info.refusal}. Add --allow-dense to serve it all the same, "
        "as vLLM does"
    )


def _info(found: Launch) -> ServerInfo | None:
    """What the server says of itself; ``None`` if it asks for a key that is not ours to know."""
    headers = {"Authorization": f"Bearer {found.key}"} if found.key else {}
    try:
        answer = httpx.get(found.url + INFO_PATH, headers=headers, timeout=30, verify=False, trust_env=False)
    except httpx.HTTPError:  # it was well a moment ago: whatever has happened shows in its log
        return None
    if answer.status_code != httpx.codes.OK:
        return None
    return ServerInfo.model_validate(answer.json())


class _Output:
    """The server's lines: kept back while it starts, unless ``verbose``, then passed on to standard error."""

    def __init__(self, verbose: bool) -> None:
        self._lock = threading.Lock()
        self._kept: list[str] = []
        self._open = verbose

    def show(self, line: str) -> None:
        with self._lock:
            if self._open:
                sys.stderr.write(line)
                sys.stderr.flush()
            else:
                self._kept.append(line)

    def open(self) -> None:
        """Pass on from now on."""
        with self._lock:
            self._open, self._kept = True, []

    def write(self) -> Any:
        """Write what was kept back into a file; returns its name."""
        with (
            self._lock,
            tempfile.NamedTemporaryFile(
                "w", prefix="kvcomm-serve-", suffix=".log", delete=False, encoding="utf-8"
            ) as file,
        ):
            file.writelines(self._kept)
            return file.name
