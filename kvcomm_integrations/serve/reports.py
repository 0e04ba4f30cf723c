"""Reports for streamed answers: vLLM's own streams leave out what a connector returns, so it is put in here.

The engine client's ``generate`` is wrapped once; it notes each request's report in a context variable, and the stream
of that request gets it as one more event before its end.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from starlette.types import Message, Send

from kvcomm_integrations.serve.live_page import LiveRoute, RunTimer
from kvcomm_integrations.wire import WIRE_KEY

_END = b"data: [DONE]"
_WATCHED = "_kvcomm_watched"


_returned: ContextVar[dict[str, Any] | None] = ContextVar("kvcomm_report", default=None)
"""Takes what the connector returns for the request that is being handled."""


def watch(client: Any, live: LiveRoute) -> None:
    """Have an engine client's answers note their reports. Idempotent.

    Args:
        client: vLLM's engine client, the one the server's handlers use.
        live: records every finished request, if it is switched on.
    """
    if getattr(client, _WATCHED, False):
        return
    generate = client.generate

    async def watched(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        timer = RunTimer(live.log) if live.enabled else None
        async with aclosing(generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                returned = _returned.get()
                if returned is not None and output.finished:
                    returned.update(output.kv_transfer_params or {})
                if timer is not None:
                    timer.output(output)
                yield output

    client.generate = watched
    setattr(client, _WATCHED, True)


def reporting(send: Send) -> Send:
    """A ``send`` that adds a report to the stream of the request that is being handled. One per request."""
    returned: dict[str, Any] = {}
    _returned.set(returned)

    async def send_with_report(message: Message) -> None:
        if message["type"] == "http.response.body" and _END in message.get("body", b"") and returned:
            before, _, after = message["body"].partition(_END)
            report = {"kv_transfer_params": {WIRE_KEY: returned.get(WIRE_KEY)}}
            event = json.dumps({"object": "text_completion", "choices": [], **report}).encode()
            message = {**message, "body": before + b"data: " + event + b"\n\n" + _END + after}
        await send(message)

    return send_with_report
