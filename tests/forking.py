"""Runs code in forked children that can never hang a test: each has a deadline and is killed when it passes."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 20.0


class HungError(AssertionError):
    """A child did not end in time."""


class Child:
    """A forked child that runs ``work`` and hands back what it returned, or its error as ``"Kind: message"``.

    Args:
        work: runs in the child; its result must be JSON.
        leave: how the child ends; ``None``: ``os._exit``.
    """

    def __init__(self, work: Callable[[], Any], leave: Callable[[], None] | None = None) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            return
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends this child even if nobody is left to kill it
            signal.alarm(int(2 * DEADLINE_S))
            os.write(write, json.dumps(_outcome(work)).encode())
            if leave is not None:
                leave()
        finally:
            os._exit(0)

    def result(self, timeout: float = DEADLINE_S) -> Any:
        """What ``work`` returned, once the child has ended.

        Raises:
            HungError: it has not ended in time.
        """
        deadline, data = time.monotonic() + timeout, b""
        try:
            while select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                if not (part := os.read(self._read, 1 << 16)):
                    return json.loads(data)
                data += part
            raise HungError(f"the child has not ended after {timeout} s; it said {data!r}")
        finally:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._read)


def in_child(work: Callable[[], Any], leave: Callable[[], None] | None = None) -> Any:
    """``work``'s result, from a child of its own."""
    return Child(work, leave).result()


def _outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except BaseException as error:  # noqa: BLE001 - the parent is told
        return f"{type(error).__name__}: {error}"
