"""Reports for streamed answers: vLLM's own streams leave out what a connector returns, so it is put in here.

The engine client's ``generate`` is watched once; the report of the request that is being handled lands in a context
variable's holder, and the stream of that request gets it as one more event before its end.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Send

from kvcomm_integrations.serve.live_page import LiveRoute
from kvcomm_integrations.wire import WIRE_KEY

_END = b"data: [DONE]"
_WATCHED = "_kvcomm_watched"


@dataclass
class Holder:
    """Takes up what the engine returns for the request at hand."""

    params: dict[str, Any] | None = None


_holder: ContextVar[Holder | None] = ContextVar("kvcomm_report", default=None)


def watch(client: Any, live: LiveRoute | None = None) -> None:
    """Have an engine client's answers note their reports. Idempotent.

    Args:
        client: vLLM's engine client, the one the server's handlers use.
        live: records every finished request, if it is switched on.
    """
    if getattr(client, _WATCHED, False):
        return
    generate = client.generate

    async def watched(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        timer = live.begin() if live is not None and live.enabled else None
        async with aclosing(generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                holder = _holder.get()
                if holder is not None and output.finished:
                    holder.params = output.kv_transfer_params
                if timer is not None:
                    timer.output(output)
                yield output

    client.generate = watched
    setattr(client, _WATCHED, True)


def reporting(send: Send) -> Send:
    """A ``send`` that adds the report of the request at hand to its stream of events. One per request."""
    holder = Holder()
    _holder.set(holder)

    async def send_with_report(message: Message) -> None:
        if message["type"] == "http.response.body" and _END in message.get("body", b"") and holder.params:
            before, _, after = message["body"].partition(_END)
            message = {**message, "body": before + _event(holder.params) + _END + after}
        await send(message)

    return send_with_report


def _event(params: dict[str, Any]) -> bytes:
    event = {"object": "text_completion", "choices": [], "kv_transfer_params": {WIRE_KEY: params.get(WIRE_KEY)}}
    return f"data: {json.dumps(event)}\n\n".encode()
