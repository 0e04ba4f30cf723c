"""Forked children of a process with an engine: they are told at once that it is not theirs, and leave it running.

How children end by ``sys.exit``, destructors and all, is in ``test_exit``.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import pytest

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.chat import runtime_for
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.prompts.messages import ChatMessage
from tests.engine.helpers import Client
from tests.forking import DEADLINE_S, Child, in_child

pytestmark = pytest.mark.engine


def chat(engine: InProcessEngine) -> str:
    runtime = runtime_for(engine)
    prepared = runtime.prepare([ChatMessage(role="user", content="Name a colour.")], session="forks")
    return "".join(getattr(piece, "text", "") for piece in runtime.stream_sync(prepared))


async def chat_async(engine: InProcessEngine) -> str:
    runtime = runtime_for(engine)
    prepared = await runtime.aprepare([ChatMessage(role="user", content="Name a colour.")], session="forks")
    return "".join([getattr(piece, "text", "") async for piece in runtime.stream(prepared)])


def answers(client: Client) -> bool:
    prompt = client.prompt("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    return bool(client.ask(prompt, tokens=2).ids)


USES: dict[str, Callable[[InProcessEngine], Any]] = {
    "call": chat,
    "async call": lambda engine: asyncio.run(chat_async(engine)),
    "workers": lambda engine: engine.call_workers("kvcomm_stats"),
    "another engine": lambda engine: InProcessEngine(EngineConfig(model=engine.config.model, seed=7)).start(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_child_is_told_at_once_and_the_engine_goes_on(
    inprocess_engine: InProcessEngine, use: Callable[[InProcessEngine], Any]
) -> None:
    client = Client(inprocess_engine)
    assert answers(client)
    error = in_child(lambda: use(inprocess_engine), atexit._run_exitfuncs)
    assert error.startswith("EngineForkedError") and str(os.getpid()) in error and "base_url" in error
    assert answers(client)


def _nothing() -> None:
    """A child that never touches the engine."""


def test_the_engine_survives_children_that_end_in_any_way(inprocess_engine: InProcessEngine) -> None:
    client = Client(inprocess_engine)
    assert answers(client)
    assert in_child(_nothing) is None
    assert in_child(_nothing, atexit._run_exitfuncs) is None
    assert in_child(inprocess_engine.close, atexit._run_exitfuncs) is None
    assert in_child(lambda: in_child(_nothing, atexit._run_exitfuncs), atexit._run_exitfuncs) is None
    process = multiprocessing.get_context("fork").Process(target=_nothing)
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    assert answers(client)


def test_a_fork_during_an_answer(inprocess_engine: InProcessEngine) -> None:
    client = Client(inprocess_engine)
    prompt = client.prompt("<|im_start|>user\nCount to forty.<|im_end|>\n<|im_start|>assistant\n")
    deltas = inprocess_engine.generate_sync(client.request(prompt, tokens=24))
    next(deltas)
    child = Child(lambda: [delta.text for delta in deltas], atexit._run_exitfuncs)
    assert list(deltas)[-1].finish_reason
    assert child.result().startswith("EngineForkedError")
    assert answers(client)


def test_counting_tokens_needs_no_engine(inprocess_engine: InProcessEngine) -> None:
    count = lambda: runtime_for(inprocess_engine).count_tokens([ChatMessage(role="user", content="Hello")])  # noqa: E731
    assert in_child(count) == count()
