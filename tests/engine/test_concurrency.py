"""Many requests at once, and requests that end early: nothing hangs, nothing leaks, nothing changes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest

from kvcomm_integrations.wire import Mode
from tests.engine.helpers import END, QUESTIONS, ROLES, Client, system

pytestmark = [pytest.mark.engine, pytest.mark.served]


def _blocks_held(client: Client, seconds: float = 20.0) -> float:
    """Share of blocks that requests hold, once the engine has had time to release those of finished ones."""
    deadline = time.monotonic() + seconds
    while (usage := client.engine.scheduler_snapshot.usage) > 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    return usage


async def test_parallel_branches_load_what_one_of_them_computes(client: Client, session: str) -> None:
    """A fan-out: all branches start at once; one prefills the question, the others wait for its harvest."""
    question = client.encode(QUESTIONS[0] + " " + QUESTIONS[1])
    requests = [
        client.request(client.prompt(system(a), ("user_question", question), END), agent=a, session=session, tokens=4)
        for a in ROLES
    ]
    answers = await asyncio.gather(*(client.arun(r) for r in requests))
    first, *others = sorted((a.report for a in answers), key=lambda report: report.loaded)
    assert first.loaded == 0
    assert all(r.loaded > 0 and r.exact + r.loaded > len(question) // 2 for r in others)


async def test_random_interleavings_are_token_identical_in_dense_mode(client: Client, session: str) -> None:
    """8 requests over 3 sessions, started at random moments, give what each gives alone."""
    requests = []
    for i in range(8):
        text = client.encode(QUESTIONS[i % 3] * (1 + i % 2))
        prompt = client.prompt(system(list(ROLES)[i % 4]), ("user_question", text), END)
        requests.append(
            client.request(prompt, agent=f"a{i % 4}", session=f"{session}-{i % 3}", mode=Mode.DENSE, tokens=8)
        )
    alone = [(await client.arun(r)).ids for r in requests]
    order = random.Random(7)

    async def later(request):
        await asyncio.sleep(order.random() * 0.5)
        return (await client.arun(request)).ids

    for _ in range(2):
        together = await asyncio.wait_for(asyncio.gather(*(later(r) for r in requests)), 120)
        assert list(together) == alone


async def test_reusing_requests_run_together(client: Client, session: str) -> None:
    """Several plans in one step share a repair pass; answers equal those given one at a time."""
    question = client.encode(QUESTIONS[2] + " " + QUESTIONS[0])
    await client.arun(
        client.request(client.prompt(system("planner"), ("user_question", question), END), agent="p", session=session)
    )
    requests = [
        client.request(
            client.prompt(system(a), ("user_question", question), END), agent=a, session=session, respond=False
        )
        for a in ("solver", "critic", "writer")
    ]
    alone = [await client.arun(r) for r in requests]
    together = await asyncio.gather(*(client.arun(r) for r in requests))
    assert [a.ids for a in together] == [a.ids for a in alone]
    assert all(a.report.loaded > 0 for a in together)


async def test_leaving_a_stream_early_frees_its_blocks(client: Client, session: str) -> None:
    question = client.encode(QUESTIONS[0] * 3)
    for agent in ("planner", "solver"):
        prompt = client.prompt(system(agent), ("user_question", question), END)
        request = client.request(prompt, agent=agent, session=session, tokens=200)
        async with contextlib.aclosing(client.engine.generate(request)) as stream:
            async for _ in stream:
                break
    assert _blocks_held(client) == 0
    after = await client.arun(client.request(prompt, agent="solver", session=session, tokens=4))
    assert len(after.ids) == 4


async def test_cancelling_before_the_first_token_frees_blocks(client: Client, session: str) -> None:
    question = client.encode(" ".join(QUESTIONS) * 3)
    prompt = client.prompt(system("critic"), ("user_question", question), END)
    for agent, pause in (("a", 0.01), ("b", 0.2), ("c", 0.6)):
        task = asyncio.create_task(client.arun(client.request(prompt, agent=agent, session=session, tokens=64)))
        await asyncio.sleep(pause)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert _blocks_held(client) == 0
    answer = await client.arun(client.request(prompt, agent="d", session=session, tokens=4))
    assert len(answer.ids) == 4


def test_breaking_out_of_a_sync_stream_aborts(client: Client, session: str) -> None:
    prompt = client.prompt(system("writer"), ("user_question", client.encode(QUESTIONS[1])), END)
    stream = client.engine.generate_sync(client.request(prompt, session=session, tokens=200))
    next(stream)
    stream.close()
    assert _blocks_held(client) == 0


def test_every_block_comes_back_after_reuse(client: Client, session: str) -> None:
    question = client.encode(" ".join(QUESTIONS))
    for agent in ROLES:
        prompt = client.prompt(system(agent), ("user_question", question), END)
        client.ask(prompt, agent=agent, session=session, tokens=20)
    assert _blocks_held(client) == 0
