"""A thread with an event loop of its own: vLLM's engine lives there, callers come from anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")


class _End:
    """Closes a stream, with the error that ended it if there was one."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class LoopThread:
    """An event loop in a daemon thread.

    Args:
        name: the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine there and wait for it. Not to be called from the loop's own thread."""
        return self.submit(work).result(timeout)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there without waiting."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def stream(self, make: Callable[[], AsyncGenerator[T, None]]) -> AsyncIterator[T]:
        """Read a stream that lives there from another loop. Leaving early cancels it there."""
        caller = asyncio.get_running_loop()
        items: asyncio.Queue[T | _End] = asyncio.Queue()

        def put(item: T | _End) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is gone: nobody is left to read
                caller.call_soon_threadsafe(items.put_nowait, item)

        pump = self.submit(_pump(make, put))
        try:
            while not isinstance(item := await items.get(), _End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            pump.cancel()

    def stream_sync(self, make: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
        """Read a stream that lives there from a thread without a loop. Leaving early cancels it there."""
        items: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        pump = self.submit(_pump(make, items.put))
        try:
            while not isinstance(item := items.get(), _End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            pump.cancel()
            with contextlib.suppress(CancelledError):
                pump.exception(timeout=10)

    def stop(self) -> None:
        """Cancel what is running there, stop the loop and end the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()


async def _pump(make: Callable[[], AsyncGenerator[T, None]], put: Callable[[T | _End], None]) -> None:
    error: BaseException | None = None
    try:
        async with contextlib.aclosing(make()) as source:
            async for item in source:
                put(item)
    except asyncio.CancelledError:
        raise
    except Exception as caught:  # noqa: BLE001 - handed on to the reader
        error = caught
    finally:
        put(_End(error))
