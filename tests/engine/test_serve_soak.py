"""A served engine under load for minutes: many clients, some of which leave or are killed in the middle of an answer.

Every request of a client that stays has to succeed, memory and free blocks have to be the same round after round, and
what the server's counters say has to be what its clients were told. ``KVCOMM_SOAK_S`` says for how long, seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.engines.http.streaming import completion_body
from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.wire import Mode, RequestReport
from tests.engine.helpers import END, QUESTIONS, Client, Part, system
from tests.engine.served import Served, ServedEngine, connect, counts, kvcomm_serve

pytestmark = [pytest.mark.engine, pytest.mark.reliability, pytest.mark.timeout(1200)]

SOAK_S = float(os.environ.get("KVCOMM_SOAK_S", "120"))
CLIENTS, CONNECTIONS = 32, 4
"""Clients at once, and the engines whose connections they share."""
AGENTS = ("planner", "solver", "critic")
TEAMS = 8
"""Agents of each role: edges enough to fill the budget for what is learned."""
ROUNDS, WARM_UP = 8, 3
"""Parts of the time, and those in which memory may still fill."""
LEAVES = 0.1
"""Share of requests whose client leaves before the answer is complete."""
MAX_MODEL_LEN = 1024
LEAVER, KILLED = "leaver", "killed"
"""Agents of the requests whose clients leave, and of the process that is killed."""
TREATMENTS = ("exact", "loaded", "repaired", "computed")
GROWTH = 32 << 20
"""Bytes by which memory may grow after the warm-up: what an allocator cannot give back, not something per request."""
KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
"""For every new number of tokens in a step oneDNN keeps a kernel, up to 1024: on a CPU vLLM's worker grows by hundreds
of MiB until it has met as many, with or without us. Here it keeps few, so that growth of our own would show."""
REUSE = ReuseConfig(
    only_if_faster=False,
    store_bytes=64 << 20,
    state_bytes=8 << 20,
    learn_rate=0.2,
    audit_rate=0.05,
    session_ttl_s=5.0,
    metric_labels=64,
)

STREAMS = """
import asyncio, json, sys, httpx

async def stream(client, url, body):
    async with client.stream("POST", url + "/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                print("token", flush=True)

async def main():
    url, bodies = json.load(sys.stdin)
    async with httpx.AsyncClient(timeout=60) as client:
        await asyncio.gather(*(stream(client, url, body) for body in bodies))

asyncio.run(main())
"""
"""A client that reads several answers at once; its process is killed meanwhile."""


@dataclass
class Tally:
    """What the clients have seen."""

    reports: list[RequestReport] = field(default_factory=list)
    """Of requests that were answered to the end."""
    left: list[int] = field(default_factory=list)
    """Prompt tokens of requests whose client left."""
    killed: list[int] = field(default_factory=list)
    """Prompt tokens of requests whose client was killed."""

    def tokens(self, treatment: str) -> int:
        return sum(getattr(report, treatment) for report in self.reports)


class Soak:
    """The clients of one server."""

    def __init__(self, server: Served, model: Path) -> None:
        self.server = server
        self.clients = [Client(connect(model, server.url, reuse=REUSE)) for _ in range(CONNECTIONS)]
        self.tally = Tally()
        self.rnd = random.Random(5)
        self.sessions = 0

    @property
    def engine(self) -> ServedEngine:
        engine = self.clients[0].engine
        assert isinstance(engine, ServedEngine)
        return engine

    async def round(self, seconds: float) -> None:
        """All clients at work for so long, with a process among them that is killed."""
        until = time.monotonic() + seconds
        clients = (self.client(self.clients[number % CONNECTIONS], until) for number in range(CLIENTS))
        await asyncio.gather(self.killed(seconds), *clients)

    async def client(self, client: Client, until: float) -> None:
        """Sessions of three agents, one after the other."""
        while time.monotonic() < until:
            await self.session(client)

    async def session(self, client: Client) -> None:
        self.sessions += 1
        number = self.sessions
        asked = f"Case {number}. " + " ".join(QUESTIONS[(number + turn) % 3] for turn in range(3))
        shared: list[Part] = [("user_question", client.encode(asked))]
        team = number % TEAMS
        for role in AGENTS:
            prompt = client.prompt(system(role), *shared, END)
            if self.rnd.random() < LEAVES:
                await self.leave(client, prompt, f"session {number}")
            mode = Mode.OBSERVE if self.rnd.random() < 0.1 else Mode.AUTO
            request = client.request(
                prompt, agent=f"{role} {team}", session=f"session {number}", mode=mode, tokens=self.rnd.randrange(1, 12)
            )
            answer = await client.arun(request)
            assert answer.report.prompt_tokens == len(prompt.token_ids)
            self.tally.reports.append(answer.report)
            shared += ["\nThen:\n", (f"agent:{role} {team}:response", answer.content)]

    async def leave(self, client: Client, prompt: SegmentedPrompt, session: str) -> None:
        """Ask for a long answer and go: after some tokens, or after some time, by then maybe without a token."""
        request = client.request(prompt, agent=LEAVER, session=session, sampling=long_answer())
        self.tally.left.append(len(prompt.token_ids))
        if self.rnd.random() < 0.5:
            enough = self.rnd.randrange(1, 6)
            async with contextlib.aclosing(client.engine.generate(request)) as stream:
                async for _ in stream:
                    enough -= 1
                    if not enough:
                        break
            return
        task = asyncio.create_task(client.arun(request))
        await asyncio.sleep(self.rnd.random() * 1.5)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self.tally.reports.append((await task).report)

    async def killed(self, seconds: float) -> None:
        """A process with four streams at once, killed when all of them run."""
        client = self.clients[0]
        bodies = []
        for number in range(4):
            question = ("user_question", client.encode(f"Case {self.sessions}, to be killed. {QUESTIONS[number % 3]}"))
            prompt = client.prompt(system("writer"), question, END)
            self.tally.killed.append(len(prompt.token_ids))
            request = client.request(prompt, agent=KILLED, session="killed", sampling=long_answer())
            bodies.append(completion_body(request, self.engine.server, f"killed-{self.sessions}-{number}"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STREAMS, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([self.server.url, bodies]).encode())
        process.stdin.close()
        for _ in range(8):  # tokens in the middle of answers of several hundred
            assert await asyncio.wait_for(process.stdout.readline(), 60) == b"token\n"
        process.kill()
        await process.wait()

    async def rest(self) -> None:
        """Wait until the server has nothing left to do. vLLM tells so with a step only, hence the requests."""
        for _ in range(100):
            prompt = self.clients[0].prompt(system("writer") + END)
            answer = await self.clients[0].arun(
                self.clients[0].request(prompt, agent="rest", session="rest", mode=Mode.DENSE, tokens=2)
            )
            self.tally.reports.append(answer.report)
            now = self.engine.scheduler_snapshot
            if (now.usage, now.running, now.waiting) == (0, 0, 0):
                return
            await asyncio.sleep(0.2)
        raise AssertionError(f"the server does not come to rest: {self.engine.scheduler_snapshot}")

    def close(self) -> None:
        for client in self.clients:
            client.engine.close()


def long_answer() -> SamplingOptions:
    return SamplingOptions(max_tokens=MAX_MODEL_LEN, temperature=0, ignore_eos=True)


@pytest.fixture
def soak(tiny_model: Path, tmp_path: Path) -> Iterator[Soak]:
    options = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "24", "--kv-cache-memory-bytes", str(64 << 20)]
    options += ["--reuse", REUSE.model_dump_json()]
    with kvcomm_serve(tiny_model, options, tmp_path / "server.log", **KERNELS) as server:
        soak = Soak(server, tiny_model)
        yield soak
        soak.close()


async def test_a_served_engine_stays_well_under_load(soak: Soak) -> None:
    root, tally = soak.server.root, soak.tally
    sizes = [soak.server.resident()]
    for _ in range(ROUNDS):
        await soak.round(SOAK_S / ROUNDS)
        await soak.rest()  # running, waiting and held blocks are 0 after every round
        sizes.append(soak.server.resident())
        [worker] = soak.engine.call_workers("kvcomm_stats")
        assert worker["store_bytes"] <= REUSE.store_bytes
        assert sum(worker["policies"].values()) <= REUSE.state_bytes
    agents = counts(root, "vllm:kvcomm_agent_tokens_total", "agent")
    print(
        f"\n{len(tally.reports)} requests answered, {len(tally.left)} left and {len(tally.killed)} killed in "
        f"{SOAK_S:.0f} s; tokens: " + ", ".join(f"{tally.tokens(name)} {name}" for name in TREATMENTS)
        + f"; resident MiB: {sizes[0] >> 20} at the start, {sizes[WARM_UP] >> 20} after the warm-up, "
        f"{sizes[-1] >> 20} at the end ({[size >> 20 for size in sizes]}); "
        f"store {worker['store_bytes'] >> 10} KiB, state {sum(worker['policies'].values()) >> 10} KiB"
    )  # fmt: skip
    assert tally.tokens("loaded") > 0
    check_counters(root, tally, agents)
    if SOAK_S >= 60:  # shorter runs do not fill the budgets during the warm-up
        assert sizes[-1] - sizes[WARM_UP] < GROWTH
    assert soak.engine.reset_prefix_cache(references=True)
    await soak.rest()
    assert soak.engine.call_workers("kvcomm_stats")[0]["store_bytes"] == 0
    assert soak.server.process.poll() is None


def check_counters(root: str, tally: Tally, agents: Counter[str]) -> None:
    """The server's counters against the reports; what clients that left have not been told lies within its bounds."""
    told: Counter[str] = Counter()
    for report in tally.reports:
        assert sum(getattr(report, name) for name in TREATMENTS) == report.prompt_tokens
        told[report.agent] += report.prompt_tokens
    gone = {LEAVER, KILLED}
    assert {agent: tokens for agent, tokens in agents.items() if agent not in gone} == {
        agent: tokens for agent, tokens in told.items() if agent not in gone
    }
    untold = {
        name: counted - tally.tokens(name)
        for name, counted in counts(root, "vllm:kvcomm_prompt_tokens_total", "treatment").items()
    }
    assert min(untold.values()) >= 0
    assert sum(untold.values()) == agents[LEAVER] + agents[KILLED] - told[LEAVER]
    assert told[LEAVER] <= agents[LEAVER] <= sum(tally.left)
    assert agents[KILLED] <= sum(tally.killed)
    requests = counts(root, "vllm:kvcomm_requests_total", "outcome")
    aborted = requests.pop("aborted", 0)
    everybody = len(tally.reports) + len(tally.left) + len(tally.killed)
    assert len(tally.reports) <= requests.total() <= requests.total() + aborted <= everybody
    for mode in Mode:
        outcome = "reused" if mode is Mode.AUTO else mode.value
        assert sum(report.mode is mode for report in tally.reports) <= requests[outcome]
    assert counts(root, "vllm:kvcomm_faults_total", "where").total() == 0
    assert counts(root, "vllm:kvcomm_breaker_trips_total", "model_name").total() == 0
