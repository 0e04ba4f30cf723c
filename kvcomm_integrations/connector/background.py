"""A worker's background thread: computes ahead what loads will need, with the lowest priority there is."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

logger = logging.getLogger(__name__)


class Background:
    """Runs tasks one after another while the engine has nothing better to do.

    Nobody waits for a task and nothing depends on it but time: what it computes ahead is computed when it is needed
    if it has not run by then. The thread starts with the first task and ends with the process.
    """

    def __init__(self) -> None:
        self._tasks: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()
        self._condition = threading.Condition()
        self._busy = False
        self._thread: threading.Thread | None = None

    def submit(self, key: Hashable, task: Callable[[], None]) -> None:
        """Run ``task`` some time; it replaces a waiting one with the same key."""
        with self._condition:
            self._tasks.pop(key, None)
            self._tasks[key] = task
            self._condition.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvcomm-background", daemon=True)
                self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do; whether that came to pass within ``timeout`` seconds."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._tasks and not self._busy, timeout)

    def _run(self) -> None:
        _yield_to_others()
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                self._condition.wait_for(lambda: bool(self._tasks))
                _, task = self._tasks.popitem(last=False)
                self._busy = True
            try:
                task()
            except Exception:  # whoever needs the result computes it, and meets the fault where it can be handled
                logger.exception("A background computation failed")


def _yield_to_others() -> None:
    """Take the lowest priority. On Linux threads have their own, and those started from here inherit it."""
    if hasattr(os, "setpriority") and threading.current_thread() is not threading.main_thread():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
