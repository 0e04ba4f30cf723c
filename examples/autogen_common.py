"""What the AutoGen examples share: a client on the demo model, and a line per call that says what was reused."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from autogen_core import EVENT_LOGGER_NAME

from kvcomm_integrations.autogen import KVCommChatCompletionClient
from kvcomm_integrations.demo_model import ensure_demo_model

TASK = (
    "A farmer has 12 cows and 15 sheep. Each cow eats 3 bales of hay per day and each sheep eats 1 bale. Hay costs 4 "
    "dollars per bale, and the dealer takes a fifth off for more than 300 bales at once. How much does the farmer "
    "spend on hay in a week, how much would it be if he sold 5 cows, and would he still get the discount then?"
)


class PrintReuse(logging.Handler):
    """Prints, for every call of a model client, how much of its prompt was not computed anew."""

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler.emit``."""
        report = getattr(record.msg, "kwargs", {}).get("kvcomm")
        if report:
            reused = report["exact"] + report["loaded"]
            share = 100 * reused // max(1, report["prompt_tokens"])
            print(f"  [{report['agent']}: {reused} of {report['prompt_tokens']} prompt tokens reused, {share} %]")


def run(main: Callable[[KVCommChatCompletionClient], Awaitable[None]]) -> None:
    """Run an example with a client on the demo model, which is made on first use."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logger = logging.getLogger(EVENT_LOGGER_NAME)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(PrintReuse())
    client = KVCommChatCompletionClient(
        model=str(ensure_demo_model()), temperature=0, max_tokens=96, max_model_len=4096, parallel_tool_calls=False
    )
    asyncio.run(_main(main, client))


async def _main(
    main: Callable[[KVCommChatCompletionClient], Awaitable[None]], client: KVCommChatCompletionClient
) -> None:
    await main(client)
    await client.close()
