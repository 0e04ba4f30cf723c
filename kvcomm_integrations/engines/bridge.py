"""Runs an async stream for a caller without an event loop, in a thread of its own that can be interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Generic, TypeVar

T = TypeVar("T")


class _Done:
    """Marks the end of a stream."""


class SyncStream(Generic[T]):
    """One async stream being read from synchronous code; closing it cancels the task and so aborts the request."""

    def __init__(self, make: Callable[[], AsyncGenerator[T, None]]) -> None:
        self._make = make
        self._items: queue.SimpleQueue[T | BaseException | _Done] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = threading.Event()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="kvcomm-stream", daemon=True)

    def __iter__(self) -> Generator[T, None, None]:
        self._thread.start()
        try:
            while not isinstance(item := self._items.get(), _Done):
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._cancel()
            self._thread.join()

    def _cancel(self) -> None:
        self._started.wait()
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nothing is left to cancel
                self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._pump())

    async def _pump(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._started.set()
        try:
            async with contextlib.aclosing(self._make()) as stream:
                async for item in stream:
                    self._items.put(item)
            self._items.put(_Done())
        except BaseException as err:
            self._items.put(err)
            if isinstance(err, asyncio.CancelledError):
                raise
