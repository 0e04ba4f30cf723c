"""A tokenizer without a model, and chat models on the fake engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from lc_helpers import CHATML, TOOL_CHATML, byte_tokenizer

from kvcomm_integrations.engines.fake import FakeEngine, Script
from kvcomm_integrations.langchain import ChatKVComm
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    """A ChatML tokenizer: the test model's if there is one."""
    folder = os.environ.get("KVCOMM_TEST_MODEL")
    return ChatTokenizer.from_pretrained(folder) if folder else byte_tokenizer(CHATML)


@pytest.fixture(scope="session")
def tool_tokenizer() -> ChatTokenizer:
    """A tokenizer whose template shows tools and thinking."""
    return byte_tokenizer(TOOL_CHATML)


@pytest.fixture
def make(tokenizer: ChatTokenizer) -> Callable[..., ChatKVComm]:
    """Makes a chat model with a script: ``make("answer", temperature=0)``."""

    def build(script: Script = None, *, engine: dict[str, Any] | None = None, **fields: Any) -> ChatKVComm:
        return ChatKVComm(model="fake", engine=FakeEngine(tokenizer, script, **(engine or {})), **fields)

    return build


@pytest.fixture
def make_tools(tool_tokenizer: ChatTokenizer) -> Callable[..., ChatKVComm]:
    """As ``make``, with a template that shows tools and thinking."""

    def build(script: Script = None, *, engine: dict[str, Any] | None = None, **fields: Any) -> ChatKVComm:
        return ChatKVComm(model="fake", engine=FakeEngine(tool_tokenizer, script, **(engine or {})), **fields)

    return build
