"""Ends a stream when AutoGen's cancellation token says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import TypeVar

from autogen_core import CancellationToken

T = TypeVar("T")


async def until_cancelled(stream: AsyncGenerator[T, None], token: CancellationToken | None) -> AsyncGenerator[T, None]:
    """``stream``, closed early when the token is cancelled, from whatever thread.

    Raises:
        asyncio.CancelledError: the token was cancelled.
    """
    token, loop = token or CancellationToken(), asyncio.get_running_loop()
    step: asyncio.Future[T] | None = None  # what is being waited for

    def cancel_step() -> None:
        if step is not None:
            step.cancel()

    def cancelled() -> None:
        with suppress(RuntimeError):  # the loop is closed, and with it the stream
            loop.call_soon_threadsafe(cancel_step)

    token.add_callback(cancelled)
    async with aclosing(stream):
        try:
            while True:
                step = asyncio.ensure_future(anext(stream))
                if token.is_cancelled():
                    step.cancel()
                try:
                    item = await step
                except StopAsyncIteration:
                    return
                yield item
        finally:
            step = None  # the token may outlive many calls
