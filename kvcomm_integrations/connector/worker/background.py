"""A worker's background thread: computes ahead what loads will need, with the lowest priority there is."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext

import torch

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Longest wait for a running task when the process exits, seconds; solving an edge takes about one."""


class Background:
    """Runs tasks one after another while the engine has nothing better to do.

    Nobody waits for a task and nothing depends on it but time: what it computes ahead is computed when it is needed
    if it has not run by then. The thread starts with the first task and ends with ``close``, which also runs when the
    process exits: a thread that is inside torch at that moment would end it with an abort.

    On a GPU a task gives its work to the stream that was current where it was submitted: vLLM's forward has a stream
    of its own, and nothing else would order that stream's work and another's. What is computed here may then be used
    there as soon as a lock lets it be seen, and its memory is that stream's.
    """

    def __init__(self) -> None:
        self._tasks: OrderedDict[Hashable, tuple[Callable[[], None], AbstractContextManager[object]]] = OrderedDict()
        self._condition = threading.Condition()
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, key: Hashable, task: Callable[[], None]) -> None:
        """Run ``task`` some time; it replaces a waiting one with the same key. Nothing runs after ``close``."""
        with self._condition:
            if self._closed:
                return
            self._tasks.pop(key, None)
            self._tasks[key] = task, _current_stream()
            self._condition.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvcomm-background", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do; whether that came to pass within ``timeout`` seconds."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._tasks and not self._busy, timeout)

    def close(self) -> None:
        """Drop what is waiting and wait until the running task is over. Idempotent."""
        with self._condition:
            self._closed = True
            self._tasks.clear()
            self._condition.notify_all()
        if self._thread is not None:
            atexit.unregister(self.close)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        _yield_to_others()
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._closed or bool(self._tasks))
                if self._closed:
                    return
                _, (task, stream) = self._tasks.popitem(last=False)
                self._busy = True
            try:
                with stream:
                    task()
            except Exception:  # whoever needs the result computes it, and meets the fault where it can be handled
                logger.exception("A background computation failed")


def _current_stream() -> AbstractContextManager[object]:
    """Makes the stream that is current here current elsewhere; nothing where no GPU is used."""
    return torch.cuda.stream(torch.cuda.current_stream()) if torch.cuda.is_initialized() else nullcontext()


def _yield_to_others() -> None:
    """Take the lowest priority. On Linux threads have their own, and those started from here inherit it."""
    if hasattr(os, "setpriority") and threading.current_thread() is not threading.main_thread():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
