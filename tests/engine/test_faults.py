"""Faults in a real engine: the request that meets one gets the dense result, and so does everybody after it.

Under ``-m reliability`` 200 random prompts are compared with plain vLLM after every fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest

from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.base import GenerationRequest, SamplingOptions
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.errors import EngineError
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.wire import Mode
from tests.engine.helpers import END, QUESTIONS, Answer, Client, system
from tests.engine.plain import plain_answers

pytestmark = pytest.mark.engine

PROMPTS, TOKENS = 200, 4
GREEDY = SamplingOptions(max_tokens=TOKENS, temperature=0, ignore_eos=True)


@dataclass
class Bench:
    """An engine under test, and what plain vLLM answers to 200 random prompts."""

    client: Client
    prompts: list[tuple[int, ...]]
    """Random; none outside of reliability runs."""
    plain: list[tuple[int, ...]]
    numbers: Iterator[int]

    def fresh(self) -> str:
        """A session or salt that nobody has used."""
        return f"fresh-{next(self.numbers)}"

    def request(self, number: int) -> GenerationRequest:
        """A random prompt with nothing to reuse."""
        prompt, mode = SegmentedPrompt(self.prompts[number], ()), Mode.DENSE if number % 2 else Mode.AUTO
        return self.client.request(prompt, session=self.fresh(), mode=mode, salt=self.fresh(), sampling=GREEDY)

    def check_plain(self) -> None:
        """With nothing to reuse the engine equals plain vLLM, one at a time and many at once; no block is held."""
        assert [self.client.run(self.request(i)).ids for i in range(len(self.prompts))] == self.plain

        async def together() -> list[Answer]:
            runs = (self.client.arun(self.request(i)) for i in range(len(self.prompts)))
            return list(await asyncio.wait_for(asyncio.gather(*runs), 120))

        assert [a.ids for a in asyncio.run(together())] == self.plain
        self.client.engine.drain()

    def pair(self) -> tuple[SegmentedPrompt, SegmentedPrompt, str]:
        """Two agents' prompts with the same content, new to the engine, and a session for both."""
        number = next(self.numbers)
        question = self.client.encode(f"{QUESTIONS[number % 3]} {QUESTIONS[1]} This is case {number}.")
        return (
            self.client.prompt(system("planner"), ("user_question", question), END),
            self.client.prompt(system("solver"), ("user_question", question), END),
            f"pair-{number}",
        )

    def dense(self, prompt: SegmentedPrompt) -> tuple[int, ...]:
        return self.client.ask(prompt, session=self.fresh(), mode=Mode.DENSE, salt=self.fresh()).ids

    def arm(self, seam: str, kind: str, times: int = 1) -> None:
        self.client.engine.call_workers("kvcomm_inject_fault", seam, kind, times)


@pytest.fixture(scope="module")
def bench(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Bench]:
    thorough = "reliability" in str(request.config.getoption("-m"))
    rnd = random.Random(11)
    lengths = [rnd.randrange(2, 200) for _ in range(PROMPTS if thorough else 0)]
    prompts = [tuple(rnd.randrange(2000, 40000) for _ in range(length)) for length in lengths]
    plain = plain_answers(tiny_model, prompts, TOKENS, tmp_path_factory.mktemp("plain")) if thorough else []
    engine = InProcessEngine(
        EngineConfig(
            model=str(tiny_model),
            max_model_len=1024,
            max_num_seqs=16,
            kv_cache_bytes=1 << 28,
            reuse=ReuseConfig(policy="ridge", audit_rate=0.0, learn_rate=0.0, max_faults=5, fault_pause_s=600.0),
        )
    )
    yield Bench(Client(engine), prompts, plain, count())
    engine.close()


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
def test_after_a_reset_of_everything_all_is_dense(bench: Bench) -> None:
    """What to do when weights have changed."""
    first, second, session = bench.pair()
    bench.client.ask(first, agent="p", session=session)
    bench.client.ask(second, agent="s", session=session, mode=Mode.OBSERVE)
    bench.client.engine.call_workers("reload_weights")
    assert bench.client.engine.reset_prefix_cache(references=True, corrections=True)
    answer = bench.client.ask(second, agent="s", session=session)
    assert answer.report.loaded == 0
    assert answer.ids == bench.dense(second)
    [stats] = bench.client.engine.call_workers("kvcomm_stats")
    assert sum(stats["policies"].values()) == 0
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
