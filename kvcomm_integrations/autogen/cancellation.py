"""Ends a stream when AutoGen's cancellation token says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from autogen_core import CancellationToken

T = TypeVar("T")


async def until_cancelled(stream: AsyncGenerator[T, None], token: CancellationToken | None) -> AsyncGenerator[T, None]:
    """``stream``, closed early when the token is cancelled, from whatever thread.

    Raises:
        asyncio.CancelledError: the token was cancelled.
    """
    async with aclosing(stream):
        if token is None:
            async for item in stream:
                yield item
            return
        link = _Link()
        token.add_callback(link)
        try:
            while True:
                try:
                    item = await link.wait(asyncio.ensure_future(anext(stream)))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            link.release()


class _Link:
    """What a token calls. Cancels the step that is being waited for, and every later one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._step: asyncio.Future[Any] | None = None
        self._cancelled = False

    def __call__(self) -> None:
        self._cancelled = True
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._cancel_step)

    async def wait(self, step: asyncio.Future[T]) -> T:
        """The result of a step, unless the token is cancelled first."""
        self._step = step
        if self._cancelled:
            step.cancel()
        return await step

    def release(self) -> None:
        """Hold on to nothing: the token may outlive many calls."""
        self._step = None

    def _cancel_step(self) -> None:
        if self._step is not None:
            self._step.cancel()
