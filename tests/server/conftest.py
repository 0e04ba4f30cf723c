"""A stub server and the HTTP engine that talks to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.http.engine import HttpEngine
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from tests.server.stub import MODEL, Stub, running


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> ChatTokenizer:
    return ChatTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def stub(tokenizer: ChatTokenizer) -> Iterator[Stub]:
    with running(Stub(tokenizer)) as stub:
        yield stub


@pytest.fixture
def connect(stub: Stub, tokenizer: ChatTokenizer) -> Iterator[Callable[..., HttpEngine]]:
    """Makes engines for the stub; each is closed at the end."""
    engines: list[HttpEngine] = []

    def make(**fields: Any) -> HttpEngine:
        fields = {"model": MODEL, "base_url": stub.url, "http": {"backoff": 0}} | fields
        engines.append(HttpEngine(EngineConfig(**fields), tokenizer))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
