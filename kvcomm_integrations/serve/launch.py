"""``kvcomm serve``: start, tell, wait, stop."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading

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
        args.model, args.vllm_options, reuse=args.reuse, tenant_keys=args.tenant_keys,
        tenant_header=args.tenant_header, live=args.live,
    )  # fmt: skip
    output = _Output(args.verbose)
    server = Supervisor(found, output.show)
    previous = {number: signal.signal(number, lambda *_: server.stop()) for number in SIGNALS}
    try:
        if found.dense:
            hint = "" if args.allow_dense else "; without --allow-dense the server will be stopped once it is loaded"
            print(f"kvcomm: {args.model} will run without reuse: {found.dense}{hint}", file=sys.stderr, flush=True)
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
    """Stop a server that can reuse nothing, unless the user allows it.

    Raises:
        UnsupportedModelError: the model's KV cannot be reused. The server has been stopped.
    """
    headers = {"Authorization": f"Bearer {found.key}"} if found.key else {}
    try:
        answer = httpx.get(found.url + INFO_PATH, headers=headers, timeout=30, verify=False, trust_env=False)
    except httpx.HTTPError:  # it answered a moment ago: its log says what has happened since
        return
    if args.allow_dense or answer.status_code != httpx.codes.OK:  # it may ask for a key that only its users have
        return
    refusal = ServerInfo.model_validate(answer.json()).refusal
    if refusal:
        server.end()
        hint = "Add --allow-dense to serve it all the same, as vLLM does"
        raise UnsupportedModelError(f"KV of {args.model!r} cannot be reused: {refusal}. {hint}")


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

    def write(self) -> str:
        """Write what was kept back into a file; returns its name."""
        handle, name = tempfile.mkstemp(".log", "kvcomm-serve-")
        with self._lock, open(handle, "w", encoding="utf-8") as file:
            file.writelines(self._kept)
        return name
