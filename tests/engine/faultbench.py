"""An engine to break, and what plain vLLM answers to 200 random prompts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.engines.interface import GenerationRequest, SamplingOptions
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.wire import Mode
from tests.engine.helpers import END, QUESTIONS, Answer, Client, system
from tests.engine.plain import plain_answers

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

    def vllm(self, call: Callable[[Any], Any]) -> Any:
        """Call vLLM's engine itself, for what our engines do not offer."""
        engine = self.client.engine
        assert isinstance(engine, InProcessEngine)
        return engine._thread().run(call(engine._started()))

    def arm(self, seam: str, kind: str, times: int = 1) -> None:
        self.client.engine.call_workers("kvcomm_inject_fault", seam, kind, times)


def make_bench(model: Path, folder: Path, *, thorough: bool) -> Bench:
    """Start the engine; ``thorough``: with the random prompts, which take half a minute after each fault."""
    rnd = random.Random(11)
    lengths = [rnd.randrange(2, 200) for _ in range(PROMPTS if thorough else 0)]
    prompts = [tuple(rnd.randrange(2000, 40000) for _ in range(length)) for length in lengths]
    plain = plain_answers(model, prompts, TOKENS, folder) if thorough else []
    engine = InProcessEngine(
        EngineConfig(
            dtype="float32",
            model=str(model),
            max_model_len=1024,
            max_num_seqs=16,
            kv_cache_bytes=1 << 28,
            reuse=ReuseConfig(only_if_faster=False, policy="ridge", idle_budget=0, max_faults=5, fault_pause_s=600.0),
        )
    )
    return Bench(Client(engine), prompts, plain, count())
