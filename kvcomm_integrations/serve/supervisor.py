"""Starts a server, waits until it answers, watches it, and leaves no process of it behind."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import httpx

from kvcomm_integrations.errors import EngineError
from kvcomm_integrations.serve.arguments import Launch
from kvcomm_integrations.serve.diagnosis import cause

logger = logging.getLogger(__name__)

STOP_S = 30.0
"""How long the server may take to stop before it is killed, seconds."""
POLL_S = 0.2
KEPT_LINES = 2000
"""Lines of the log that are kept to tell why a start failed."""

_PR_SET_PDEATHSIG = 1


class Supervisor:
    """One server process with all its children.

    Args:
        launch: what to start.
        show: receives every line the server writes.
    """

    def __init__(self, launch: Launch, show: Callable[[str], None]) -> None:
        self._launch = launch
        self._show = show
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._stop = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def stop(self) -> None:
        """Ask the server to stop; may be called from a signal handler, and again to kill it."""
        if self._stop.is_set() and self._process is not None:
            self._kill_all()
        self._stop.set()

    @property
    def stopped(self) -> bool:
        """Whether the server was asked to stop."""
        return self._stop.is_set()

    def start(self, timeout: float) -> None:
        """Start the server and wait until it answers.

        Raises:
            EngineError: it ended before, or took longer than ``timeout`` seconds; tells why. Nothing is left running.
        """
        self._process = subprocess.Popen(
            self._launch.command, env=self._launch.environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            preexec_fn=_die_with_parent(os.getpid()),
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        deadline = time.monotonic() + timeout
        while not self._stop.wait(POLL_S):
            if self._process.poll() is not None:
                self.end()
                raise EngineError(f"the server for {self._launch.model!r} did not start: {cause(self._tail)}")
            if healthy(self._launch.url):
                return
            if time.monotonic() > deadline:
                self.end()
                hint = "see its log or raise --start-timeout"
                raise EngineError(f"the server did not answer within {timeout:.0f} s; {hint}")
        self.end()

    def wait(self) -> int:
        """Wait until the server ends or is asked to; returns its exit status, 0 if it was asked."""
        assert self._process is not None
        while self._process.poll() is None and not self._stop.wait(POLL_S):
            pass
        asked = self.stopped
        self.end()
        return 0 if asked else int(self._process.returncode or 1)

    def end(self) -> None:
        """Stop the server, then whatever is left of its process group. Idempotent."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                logger.warning("The server did not stop within %.0f s and is killed", STOP_S)
        self._kill_all()
        process.wait()
        if self._reader is not None:
            self._reader.join(5)

    def _kill_all(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._tail.append(line.rstrip("\n"))
                self._show(line)


def healthy(url: str) -> bool:
    """Whether the server answers and its engine lives. The certificate is not checked."""
    try:
        return httpx.get(f"{url}/health", timeout=5, verify=False, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _die_with_parent(parent: int) -> Callable[[], None]:
    """What a child runs first: it gets SIGTERM when this process dies, even if it is killed."""
    libc: Any = ctypes.CDLL(None, use_errno=True)

    def set_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return set_signal
