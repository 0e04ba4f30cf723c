"""Model clients on the fake engine, and what AutoGen's event logger received."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ag_helpers import CHATML, THINKING, byte_tokenizer
from autogen_core import EVENT_LOGGER_NAME

from kvcomm_integrations.autogen import KVCommChatCompletionClient
from kvcomm_integrations.engines.fake import FakeEngine, Script
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import RequestReport


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    """A ChatML tokenizer: the test model's if there is one."""
    folder = os.environ.get("KVCOMM_TEST_MODEL")
    return ChatTokenizer.from_pretrained(folder) if folder else byte_tokenizer(CHATML)


@pytest.fixture(scope="session")
def thinking_tokenizer() -> ChatTokenizer:
    """A tokenizer whose template shows tools and opens a thinking block."""
    return byte_tokenizer(THINKING)


@pytest.fixture
def make(tokenizer: ChatTokenizer) -> Callable[..., KVCommChatCompletionClient]:
    """Makes a client with a script: ``make("answer", temperature=0)``."""

    def build(
        script: Script = None,
        *,
        engine: dict[str, Any] | None = None,
        template: ChatTokenizer | None = None,
        **settings: Any,
    ) -> KVCommChatCompletionClient:
        options = {"max_model_len": 65536, **(engine or {})}
        return KVCommChatCompletionClient(
            engine=FakeEngine(template or tokenizer, script, **options), **{"model": "fake", **settings}
        )

    return build


@pytest.fixture
def make_thinking(
    make: Callable[..., KVCommChatCompletionClient], thinking_tokenizer: ChatTokenizer
) -> Callable[..., KVCommChatCompletionClient]:
    """As ``make``, with a template that shows tools and opens a thinking block."""

    def build(script: Script = None, **settings: Any) -> KVCommChatCompletionClient:
        return make(script, template=thinking_tokenizer, **settings)

    return build


@pytest.fixture
def events() -> Iterator[list[Any]]:
    """AutoGen's model events, in order."""
    received: list[Any] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if type(record.msg).__name__ in ("LLMCallEvent", "LLMStreamStartEvent", "LLMStreamEndEvent"):
                received.append(record.msg)

    logger, handler = logging.getLogger(EVENT_LOGGER_NAME), Keep()
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False  # the rest of a team's traffic is on it too
    logger.addHandler(handler)
    yield received
    logger.removeHandler(handler)
    logger.setLevel(level)
    logger.propagate = propagate


@pytest.fixture
def reports(events: list[Any]) -> Callable[[], list[RequestReport]]:
    """The reports of all calls so far, in the order in which they ended."""
    return lambda: [RequestReport.model_validate(e.kwargs["kvcomm"]) for e in events if "kvcomm" in e.kwargs]
