"""What the LangGraph examples share: a chat model on the demo model, and a line per call that says what was reused."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult

from kvcomm_integrations.demo_model import ensure_demo_model
from kvcomm_integrations.langchain import ChatKVComm

TASK = (
    "A farmer has 12 cows and 15 sheep. Each cow eats 3 bales of hay per day and each sheep eats 1 bale. Hay costs 4 "
    "dollars per bale, and the dealer takes a fifth off for more than 300 bales at once. How much does the farmer "
    "spend on hay in a week, how much would it be if he sold 5 cows, and would he still get the discount then?"
)


class PrintReuse(BaseCallbackHandler):
    """Prints, for every call of a chat model, how much of its prompt was not computed anew."""

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        """See ``BaseCallbackHandler.on_llm_end``."""
        message = getattr(response.generations[0][0], "message", None)
        if message and message.usage_metadata:
            agent = message.response_metadata["kvcomm"].get("agent", "")
            tokens = message.usage_metadata["input_tokens"]
            reused = message.usage_metadata["input_token_details"]["cache_read"]
            print(f"  [{agent}: {reused} of {tokens} prompt tokens reused, {100 * reused // max(1, tokens)} %]")


def chat_model() -> ChatKVComm:
    """A chat model on the demo model, which is made on first use. It is small: it seldom calls tools."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return ChatKVComm(
        model=str(ensure_demo_model()), temperature=0, max_tokens=96, max_model_len=4096, callbacks=[PrintReuse()]
    )


def show(messages: Iterable[BaseMessage]) -> None:
    """Print a conversation, a paragraph per message."""
    for message in messages:
        print(f"{message.name or message.type}: {message.text}\n")
