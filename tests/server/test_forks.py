"""Forked children of a process that uses a server: gunicorn ``--preload``, Celery, ``multiprocessing``, by hand.

A child has connections and a loop of its own, shares no socket with its parent, and never hangs.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvcomm_integrations.chat.runtime import ChatRuntime, runtime_for
from kvcomm_integrations.engines import registry
from kvcomm_integrations.engines.http.engine import HttpEngine
from kvcomm_integrations.prompts.chat_message import ChatMessage
from kvcomm_integrations.report.live import serve_live
from tests.forking import DEADLINE_S, Child, in_child
from tests.server.stub import MODEL, Stub, well
from tests.server.test_http_engine import Connect, request, run

ANSWER = "The answer is six."


def ask(engine: HttpEngine) -> str:
    return "".join(delta.text for delta in run(engine))


async def ask_async(engine: HttpEngine) -> str:
    return "".join([delta.text async for delta in engine.generate(request())])


def chat(engine: HttpEngine, timeout: float | None = None) -> str:
    runtime = runtime_for(engine)
    prepared = runtime.prepare([ChatMessage(role="user", content="What is three and three?")])
    return "".join(getattr(piece, "text", "") for piece in runtime.stream_sync(prepared, timeout=timeout))


@pytest.fixture
def engine(connect: Connect) -> HttpEngine:
    """An engine that its process has used."""
    engine = connect()
    assert ask(engine) == ANSWER
    return engine


# ---- a child works -------------------------------------------------------------------------------------------------


def test_a_child_answers_and_so_does_its_parent_afterwards(engine: HttpEngine) -> None:
    assert in_child(lambda: ask(engine)) == ANSWER
    assert ask(engine) == ANSWER


def test_a_child_of_a_process_that_has_only_made_the_engine(connect: Connect) -> None:
    engine = connect()
    assert in_child(lambda: ask(engine)) == ANSWER
    assert ask(engine) == ANSWER


def test_a_child_of_a_child(engine: HttpEngine) -> None:
    assert in_child(lambda: [in_child(lambda: ask(engine)), ask(engine), in_child(lambda: ask(engine))]) == [ANSWER] * 3


def test_several_children_at_once_while_the_parent_goes_on(engine: HttpEngine) -> None:
    children = [Child(lambda: [ask(engine) for _ in range(5)]) for _ in range(4)]
    assert [ask(engine) for _ in range(5)] == [ANSWER] * 5
    assert [child.result() for child in children] == [[ANSWER] * 5] * 4


def test_async_calls_in_a_child_again_and_again(engine: HttpEngine) -> None:
    assert in_child(lambda: [asyncio.run(ask_async(engine)) for _ in range(3)]) == [ANSWER] * 3


async def test_a_fork_inside_a_coroutine(engine: HttpEngine) -> None:
    assert await ask_async(engine) == ANSWER
    child = Child(lambda: [ask(engine), asyncio.run(ask_async(engine))])
    assert await asyncio.to_thread(child.result) == [ANSWER] * 2
    assert await ask_async(engine) == ANSWER


@pytest.mark.parametrize("timeout", [None, 10.0])
def test_chats_in_a_child(engine: HttpEngine, timeout: float | None) -> None:
    assert chat(engine, timeout) == ANSWER
    assert in_child(lambda: chat(engine, timeout)) == ANSWER
    assert chat(engine, timeout) == ANSWER


def test_a_model_of_equal_settings_made_in_the_child(stub: Stub, tiny_model: Path) -> None:
    from kvcomm_integrations.langchain import ChatKVComm

    make = lambda: ChatKVComm(model=MODEL, base_url=stub.url, tokenizer=str(tiny_model))  # noqa: E731
    model = make()
    assert model.invoke("Hello").text == ANSWER
    assert in_child(lambda: [make().invoke("Hello").text, model.invoke("Hello").text]) == [ANSWER] * 2
    assert in_child(lambda: asyncio.run(model.ainvoke("Hello")).text) == ANSWER
    assert len(model.report().records) == 1
    model.runtime.engine.close()


async def test_autogen_in_a_child(stub: Stub, tiny_model: Path) -> None:
    from autogen_core.models import UserMessage

    from kvcomm_integrations.autogen import KVCommChatCompletionClient

    client = KVCommChatCompletionClient(model=MODEL, base_url=stub.url, tokenizer=str(tiny_model))
    call = lambda: client.create([UserMessage(content="Hello", source="user")])  # noqa: E731
    assert (await call()).content == ANSWER
    child = Child(lambda: asyncio.run(call()).content)
    assert await asyncio.to_thread(child.result) == ANSWER
    await client.runtime.engine.aclose()


_pool: list[HttpEngine] = []
"""What workers of a pool find: a lambda cannot be sent to them."""


def _ask_in_pool(_: int = 0) -> str:
    return ask(_pool[0])


def test_pools_with_the_fork_method(engine: HttpEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "_pool", [engine])
    fork = multiprocessing.get_context("fork")
    with fork.Pool(2) as pool:
        assert pool.map_async(_ask_in_pool, range(4)).get(DEADLINE_S) == [ANSWER] * 4
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=fork) as executor:
        assert list(executor.map(_ask_in_pool, range(4), timeout=DEADLINE_S)) == [ANSWER] * 4
    process = fork.Process(target=_ask_in_pool)
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    assert ask(engine) == ANSWER


# ---- a fork while the parent is busy -------------------------------------------------------------------------------


@pytest.fixture
def slow(stub: Stub) -> Stub:
    stub.pause = 0.15
    return stub


def test_a_fork_during_a_call_of_another_thread(connect: Connect, slow: Stub) -> None:
    engine = connect()
    ask(engine)
    pool = concurrent.futures.ThreadPoolExecutor(2)
    calls = [pool.submit(ask, engine) for _ in range(2)]
    time.sleep(0.3)
    assert in_child(lambda: ask(engine), atexit._run_exitfuncs) == ANSWER
    assert [call.result(DEADLINE_S) for call in calls] == [ANSWER] * 2


def test_a_fork_during_the_handshake_of_another_thread(connect: Connect, stub: Stub) -> None:
    engine = connect()
    begun = threading.Event()
    tokenize = stub.tokenizer.encode

    def dawdle(*args: Any, **kwargs: Any) -> list[int]:
        begun.set()
        time.sleep(0.5)
        return tokenize(*args, **kwargs)

    stub.tokenizer.encode = dawdle  # type: ignore[method-assign]
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            call = pool.submit(ask, engine)
            assert begun.wait(DEADLINE_S)
            assert in_child(lambda: ask(engine)) == ANSWER
            assert call.result(DEADLINE_S) == ANSWER
    finally:
        del stub.tokenizer.encode


def test_forks_whatever_locks_are_held(engine: HttpEngine) -> None:
    chat(engine)
    runtime: ChatRuntime = runtime_for(engine)
    with elsewhere(engine._lock, runtime._lock, runtime.runs._lock, runtime.registry._lock, registry._lock):
        assert in_child(lambda: [chat(engine), registry.get_engine(engine.config).closed]) == [ANSWER, False]
    with elsewhere(engine.tokenizer._encodings._lock):  # the stub's too: no answer before it is free
        assert in_child(lambda: engine.tokenizer.count("A text nobody has counted yet")) > 0
    assert chat(engine) == ANSWER


@contextlib.contextmanager
def elsewhere(*locks: Any) -> Iterator[None]:
    """The locks are held by another thread."""
    taken, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            taken.set()
            leave.wait(DEADLINE_S)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(hold)
        assert taken.wait(DEADLINE_S)
        try:
            yield
        finally:
            leave.set()


def test_an_answer_begun_in_the_parent_cannot_be_read_on_in_a_child(connect: Connect, slow: Stub) -> None:
    engine = connect()
    deltas = engine.generate_sync(request())
    first = next(deltas).text
    error = in_child(lambda: [delta.text for delta in deltas])
    assert error.startswith("EngineForkedError") and str(os.getpid()) in error
    assert first + "".join(delta.text for delta in deltas) == ANSWER


# ---- what a child must leave alone -----------------------------------------------------------------------------------


def connections(stub: Stub) -> int:
    port = int(stub.url.split(":")[-1].removesuffix("/v1"))
    found = psutil.Process().net_connections("tcp")
    return sum(1 for c in found if c.status == psutil.CONN_ESTABLISHED and c.raddr and c.raddr.port == port)


def test_a_child_holds_no_connection_of_its_parent(connect: Connect, stub: Stub) -> None:
    engine = connect()
    assert engine.server.connector
    assert connections(stub) > 0
    assert in_child(lambda: connections(stub)) == 0
    assert ask(engine) == ANSWER


def test_leaving_early_reaches_the_server_while_a_child_lives(connect: Connect, stub: Stub) -> None:
    engine = connect()
    ask(engine)
    stub.pause, stub.events = 0.05, lambda s, body: (event for _ in range(50) for event in list(well(s, body))[:1])
    deltas = engine.generate_sync(request())
    next(deltas)
    child = Child(lambda: time.sleep(5))
    deltas.close()  # type: ignore[attr-defined]
    assert stub.left.wait(3)
    os.kill(child.pid, 9)
    with pytest.raises(json.JSONDecodeError):
        child.result()


def test_closing_in_a_child_closes_nothing_of_the_parents(engine: HttpEngine) -> None:
    assert in_child(engine.close) is None
    assert in_child(registry.close_engines) is None
    assert in_child(lambda: asyncio.run(engine.aclose())) is None
    assert ask(engine) == ANSWER


def test_a_live_page_stays_with_the_parent(engine: HttpEngine) -> None:
    with serve_live(lambda: runtime_for(engine).runs) as live:
        port = int(live.url.split(":")[-1].split("/")[0])
        listening = lambda: sum(c.laddr.port == port for c in psutil.Process().net_connections("tcp"))  # noqa: E731
        assert listening() == 1
        assert in_child(lambda: [listening(), live.close()]) == [0, None]
        assert listening() == 1


# ---- exits -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import multiprocessing, os, signal, sys, threading
from kvcomm_integrations import ChatKVComm
model = ChatKVComm(model=sys.argv[1], base_url=sys.argv[2], tokenizer=sys.argv[3])
assert model.invoke("Hello").text == "The answer is six."

def child(use, leave):
    pid = os.fork()
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return
    signal.alarm(20)
    if use:
        assert model.invoke("Hello").text == "The answer is six."
    leave()

for use in (False, True):
    child(use, lambda: sys.exit(0))
    child(use, lambda: os._exit(0))
assert model.invoke("Hello").text == "The answer is six."
running = threading.Thread(target=model.invoke, args=("Hello",))
running.start()
child(False, lambda: sys.exit(0))
running.join()
print("DONE", flush=True)
"""


def test_children_end_in_every_way_and_the_parent_goes_on(stub: Stub, tiny_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "app.py"
    script.write_text(SCRIPT)
    stub.pause = 0.02
    arguments = [MODEL, stub.url, str(tiny_model)]
    done = subprocess.run(
        [sys.executable, "-W", "default::ResourceWarning", str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "DONE\n"
    assert "Error" not in done.stderr and "unclosed" not in done.stderr


# ---- event loops without forks ---------------------------------------------------------------------------------------


def test_asyncio_run_several_times(engine: HttpEngine) -> None:
    assert [asyncio.run(ask_async(engine)) for _ in range(3)] == [ANSWER] * 3


async def test_sync_calls_under_a_running_loop_as_in_a_notebook(engine: HttpEngine) -> None:
    assert ask(engine) == ANSWER
    assert await ask_async(engine) == ANSWER
