"""A thread with an event loop of its own: engines live in one, callers without a loop run their calls in another."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import selectors
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from kvcomm_integrations.errors import EngineForkedError
from kvcomm_integrations.forks import abandon, let_go, watch

T = TypeVar("T")

CANCEL_S = 10.0
"""How long to wait for a cancelled stream to end, seconds."""


class _End:
    """Closes a stream, with the error that ended it if there was one."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class LoopThread:
    """An event loop in a daemon thread. Of no use in forked children, which have no such thread.

    Args:
        name: the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._pid = os.getpid()
        self._forked = False
        watch(self)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """It runs, and in this process."""
        return not self._forked and self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine there and wait for it. Not to be called from the loop's own thread."""
        return self.submit(work).result(timeout)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there without waiting."""
        try:
            self._refuse_in_child()
        except EngineForkedError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def stream(self, make: Callable[[], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        """Read a stream that lives there from another loop, as fast as it comes. Leaving early cancels it there."""
        caller = asyncio.get_running_loop()
        items: asyncio.Queue[T | _End] = asyncio.Queue()

        def put(item: T | _End) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is gone: nobody is left to read
                caller.call_soon_threadsafe(items.put_nowait, item)

        pump = self.submit(_pump(make, put))
        try:
            while not isinstance(item := await items.get(), _End):
                yield item
                self._refuse_in_child()
            if item.error is not None:
                raise item.error
        finally:
            if not self._forked:
                pump.cancel()

    def stream_sync(self, make: Callable[[], AsyncGenerator[T, None]]) -> Generator[T, None, None]:
        """Read a stream that lives there from a thread without a loop, an item at a time.

        It goes on only when the next item is asked for. Leaving early, by ``close`` or an exception such as
        ``KeyboardInterrupt``, cancels it there and waits until it has ended. Context variables are the caller's.
        """
        items: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        wanted = asyncio.Semaphore(0)
        pump = self.submit(_pump(make, items.put, wanted))
        item: T | _End | None = None
        try:
            while True:
                self._refuse_in_child()
                self._soon(wanted.release)
                item = items.get()
                if isinstance(item, _End):
                    break
                yield item
            if item.error is not None:
                raise item.error
        finally:
            if not self._forked and not isinstance(item, _End):
                self._soon(pump.cancel)
                if threading.current_thread() is not self._thread:  # the garbage collector may be the one that leaves
                    with contextlib.suppress(queue.Empty):
                        while not isinstance(items.get(timeout=CANCEL_S), _End):
                            """What was on its way is of no use any more."""

    def stop(self) -> None:
        """Cancel what is running there, stop the loop and end the thread. Idempotent."""
        if not self.alive:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    def after_fork(self) -> None:
        """The loop is the parent's: let go of its connections, and of the selector that both processes would share."""
        if self._forked or self._loop.is_closed():
            return
        self._forked = True
        abandon(self)
        registered = [key.fd for key in self._selector.get_map().values()]
        fileno = getattr(self._selector, "fileno", None)
        let_go(registered if fileno is None else [*registered, fileno()])

    def _soon(self, callback: Callable[[], Any]) -> None:
        """Call there. On a loop that has ended nothing is left to call for."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def _refuse_in_child(self) -> None:
        if self._forked:
            raise EngineForkedError(
                f"an answer begun in process {self._pid} cannot be read in its forked child {os.getpid()}; make the "
                "call again in the child"
            )

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


async def _pump(
    make: Callable[[], AsyncGenerator[T, None]],
    put: Callable[[T | _End], None],
    wanted: asyncio.Semaphore | None = None,
) -> None:
    """Hand over the items of a stream and then its end; with ``wanted`` each item only once it is asked for."""
    error: BaseException | None = None
    try:
        async with contextlib.aclosing(make()) as source:
            while wanted is None or await wanted.acquire():
                put(await anext(source))
    except StopAsyncIteration:
        """The stream has come to its end."""
    except asyncio.CancelledError:
        raise
    except BaseException as caught:  # noqa: BLE001 - handed on to the reader
        error = caught
    finally:
        put(_End(error))


_sync_loop: LoopThread | None = None


def sync_loop() -> LoopThread:
    """The loop on which callers without one run their calls; made on first use, and anew in a forked child.

    There is no lock that a fork could leave held: of two threads that come first at once each may make a loop, and one
    of the two then idles.
    """
    global _sync_loop
    loop = _sync_loop
    if loop is None or not loop.alive:
        loop = _sync_loop = LoopThread("kvcomm-sync")
        atexit.register(loop.stop)
    return loop
