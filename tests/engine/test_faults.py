"""Faults in a real engine: the request that meets one gets the dense result, and so does everybody after it.

Under ``-m reliability`` 200 random prompts are compared with plain vLLM after every fault. In process only: faults end
engines and their workers, and a server would have to be started again after each; what they do lies below the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcomm_integrations.engines.interface import GenerationRequest
from kvcomm_integrations.errors import EngineError
from kvcomm_integrations.wire import Mode
from tests.engine.faultbench import Bench, make_bench
from tests.engine.helpers import END, Answer, system

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def bench(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Bench]:
    thorough = "reliability" in str(request.config.getoption("-m"))
    bench = make_bench(tiny_model, tmp_path_factory.mktemp("plain"), thorough=thorough)
    yield bench
    bench.client.engine.close()


@pytest.fixture(autouse=True)
def working(bench: Bench) -> Iterator[None]:
    yield
    bench.client.engine.reset_prefix_cache(references=True)
    first, second, session = bench.pair()
    bench.client.ask(first, agent="p", session=session)
    assert bench.client.ask(second, agent="s", session=session).report.loaded > 0


@pytest.mark.reliability
def test_random_prompts_equal_plain_vllm(bench: Bench) -> None:
    bench.check_plain()


@pytest.mark.reliability(always=True)
@pytest.mark.parametrize(
    ("seam", "kind"),
    [("correct", "raise"), ("correct", "nan"), ("reference", "raise"), ("reference", "nan"), ("repair", "raise")],
)
def test_a_request_whose_load_fails_gets_the_dense_answer(bench: Bench, seam: str, kind: str) -> None:
    first, second, session = bench.pair()
    bench.client.ask(first, agent="p", session=session)
    bench.arm(seam, kind)
    answer = bench.client.ask(second, agent="s", session=session)
    assert answer.ids == bench.dense(second)
    assert answer.report.loaded == answer.report.repaired == 0
    assert answer.report.reason.startswith("computed densely after a fault")
    bench.check_plain()


@pytest.mark.reliability
@pytest.mark.parametrize(
    ("seam", "kind"),
    [("harvest", "raise"), ("harvest", "nan"), ("report", "lose"), ("observe", "raise"), ("observe", "nan")],
)
def test_what_is_not_learned_or_kept_is_computed(bench: Bench, seam: str, kind: str) -> None:
    first, second, session = bench.pair()
    bench.arm(seam, kind, 3)
    bench.client.ask(first, agent="p", session=session, respond=False)
    if seam == "observe":
        bench.client.ask(second, agent="s", session=session, mode=Mode.OBSERVE)
        bench.client.ask(second, agent="s", session=session, tokens=1)
    else:
        started = time.monotonic()
        answer = bench.client.ask(second, agent="s", session=session)
        assert answer.ids == bench.dense(second)
        assert time.monotonic() - started < 20
    bench.arm(seam, kind, 0)
    bench.client.ask(first, session=bench.fresh(), tokens=1)
    bench.check_plain()


@pytest.mark.reliability
def test_a_lost_audit_costs_nothing(bench: Bench) -> None:
    first, second, session = bench.pair()
    bench.client.ask(first, agent="p", session=session)
    bench.arm("audit", "raise")
    request = bench.client.request(second, agent="s", session=session, mode=Mode.OBSERVE)
    answer = bench.client.run(replace(request, params=request.params.model_copy(update={"audit": ("aligned",)})))
    assert answer.ids == bench.dense(second)
    bench.check_plain()


@pytest.mark.reliability
def test_a_slow_worker_is_waited_for(bench: Bench) -> None:
    first, second, session = bench.pair()
    bench.client.ask(first, agent="p", session=session)
    bench.arm("correct", "slow")
    answer = bench.client.ask(second, agent="s", session=session)
    assert answer.report.loaded > 0
    bench.check_plain()


@pytest.mark.reliability
def test_too_many_faults_switch_reuse_off_until_it_is_reset(bench: Bench) -> None:
    first, second, session = bench.pair()
    bench.client.ask(first, agent="p", session=session, respond=False)
    bench.arm("correct", "raise", 100)
    for _ in range(5):
        report = bench.client.ask(second, agent="s", session=session, respond=False, tokens=2).report
        assert report.reason.startswith("computed densely after a fault")
    off = bench.client.ask(second, agent="s", session=session)
    assert off.report.reason.startswith("switched off for a while")
    assert off.ids == bench.dense(second)
    bench.check_plain()
    bench.arm("correct", "raise", 0)


@pytest.mark.reliability
def test_requests_aborted_in_every_phase_leave_nothing_behind(bench: Bench) -> None:
    rnd = random.Random(3)

    async def flood() -> None:
        async def one(number: int) -> None:
            first, second, _ = bench.pair()
            prompt = second if number % 2 else first
            request = bench.client.request(prompt, agent=f"a{number % 3}", session=f"flood-{number % 4}", tokens=40)
            task = asyncio.create_task(bench.client.arun(request))
            await asyncio.sleep(rnd.random() * 0.6)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        for _ in range(3):
            await asyncio.gather(*(one(number) for number in range(16)))

    asyncio.run(asyncio.wait_for(flood(), 100))
    bench.check_plain()


@pytest.mark.reliability
def test_requests_preempted_at_any_moment_end_as_if_they_had_not_been(bench: Bench) -> None:
    rnd, forced = random.Random(4), 0

    async def flood() -> list[Answer]:
        async def preempt() -> None:
            nonlocal forced
            while True:
                await asyncio.sleep(rnd.random() * 0.2)
                forced += 1
                with contextlib.suppress(Exception):  # vLLM preempts, then minds that finished requests hold blocks
                    await asyncio.to_thread(bench.vllm, lambda llm: llm.reset_prefix_cache(reset_running_requests=True))

        requests = [bench.request(number) for number in range(len(bench.prompts))]
        for number in range(60):
            prompt = bench.pair()[number % 2]
            requests.append(bench.client.request(prompt, agent=f"a{number % 3}", session=f"p-{number % 4}", tokens=8))
        rnd.shuffle(requests)
        storm = asyncio.create_task(preempt())
        try:
            answers = await asyncio.wait_for(asyncio.gather(*map(bench.client.arun, requests)), 200)
        finally:
            storm.cancel()
        by_prompt = {request.prompt.token_ids: answer for request, answer in zip(requests, answers, strict=True)}
        return [by_prompt[prompt] for prompt in bench.prompts]

    assert [answer.ids for answer in asyncio.run(flood())] == bench.plain
    assert forced > 20
    bench.check_plain()


async def nap(bench: Bench, request: GenerationRequest, level: int, mode: str) -> Answer:
    """Send the engine to sleep while it answers a request, and wake it up."""
    running = asyncio.create_task(bench.client.arun(request))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(bench.vllm, lambda llm: llm.sleep(level, mode))
    await asyncio.to_thread(bench.vllm, lambda llm: llm.wake_up())
    return await asyncio.wait_for(running, 60)


@pytest.mark.reliability(always=True)
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_an_engine_that_has_slept_reuses_what_it_still_holds(bench: Bench, mode: str) -> None:
    """On a CPU vLLM frees no memory, but it stops, clears and starts again as everywhere."""
    client = bench.client
    for level in (0, 1, 2):
        first, second, session = bench.pair()
        client.ask(first, agent="p", session=session)
        running = client.request(second, agent="b", session=session, tokens=120)  # longer than the nap's start
        ended = asyncio.run(nap(bench, running, level, mode)).last.finish_reason
        assert ended == ("abort" if mode == "abort" else "length")
        answer = client.ask(second, agent="s", session=session)
        if level and mode != "keep":  # vLLM has cleared its own cache and asked us to do the same
            assert answer.report.loaded == 0
            assert answer.ids == bench.dense(second)
        else:  # nothing was cleared, or the kept request was computed again afterwards
            assert answer.report.loaded > 0
    bench.check_plain()


@pytest.fixture
def other_weights(tiny_model: Path, tmp_path: Path) -> Path:
    """A folder with the tiny model's configuration and other weights."""
    folder = tmp_path / "other"
    shutil.copytree(tiny_model, folder)
    [path] = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(5)
    tensors = {name: t + 0.02 * torch.randn(t.shape, generator=generator) for name, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.mark.reliability(always=True)
def test_after_a_change_of_weights_all_is_forgotten(bench: Bench, tiny_model: Path, other_weights: Path) -> None:
    """Nobody tells us: only vLLM's own cache is emptied, as has to be done without a connector."""
    client = bench.client
    first, second, session = bench.pair()
    old = client.ask(first, agent="p", session=session)
    client.ask(second, agent="s", session=session, mode=Mode.OBSERVE)
    running: list[Answer] = []

    async def change() -> None:
        task = asyncio.create_task(client.arun(client.request(first, agent="r", session=session, tokens=60)))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(client.engine.call_workers, "reload_weights", None, str(other_weights))
        running.append(await asyncio.wait_for(task, 60))

    asyncio.run(change())
    client.engine.drain()
    [stats] = client.engine.call_workers("kvcomm_stats")
    assert (stats["references"], sum(stats["policies"].values())) == (0, 0)
    assert client.engine.reset_prefix_cache()
    mixed = client.prompt(system("critic"), ("answer", running[0].content), END)  # computed with both
    assert client.ask(mixed, agent="c", session=session, respond=False).report.loaded == 0
    answer = client.ask(second, agent="s", session=session)
    assert answer.report.loaded == 0
    assert answer.ids == bench.dense(second)
    assert client.ask(first, agent="p", session=session).ids != old.ids
    assert client.ask(second, agent="t", session=session).report.loaded > 0  # of the new weights
    client.engine.call_workers("reload_weights", None, str(tiny_model))
    assert client.engine.reset_prefix_cache()
    assert client.ask(first, agent="p", session=session).ids == old.ids
    bench.check_plain()


@pytest.mark.reliability(always=True)
def test_a_released_session_is_forgotten(bench: Bench) -> None:
    first, second, session = bench.pair()
    bench.client.ask(first, agent="p", session=session)
    bench.client.engine.release_session(session, tenant="somebody else")
    assert bench.client.ask(second, agent="s", session=session).report.loaded > 0
    bench.client.engine.release_session(session)
    answer = bench.client.ask(second, agent="t", session=session)
    assert answer.report.loaded == 0
    assert answer.ids == bench.dense(second)


@pytest.mark.reliability
def test_a_dead_worker_is_an_error_and_the_next_call_starts_anew(bench: Bench) -> None:
    first, second, session = bench.pair()
    bench.client.ask(first, agent="p", session=session)
    bench.arm("correct", "exit")
    started = time.monotonic()
    with pytest.raises(EngineError, match="died"):
        bench.client.ask(second, agent="s", session=session)
    assert time.monotonic() - started < 60
    answer = bench.client.ask(second, agent="s", session=session)
    assert answer.report.loaded == 0
    assert answer.ids == bench.dense(second)
    bench.check_plain()
