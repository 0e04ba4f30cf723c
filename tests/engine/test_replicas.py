"""Two real replicas behind vLLM's own router: a session's agents meet on one of them; losing it costs a dense prefill.

Who gets which session, and what happens to requests in flight, is tested with stubs in ``tests/server/test_router.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.serve.supervisor import healthy
from kvcomm_integrations.wire import Mode, RequestReport
from tests.engine.helpers import END, QUESTIONS, Client, Part, system
from tests.engine.served import START_S, Served, connect, counts, free_port, kvcomm_serve

pytest.importorskip("vllm_router")

pytestmark = [pytest.mark.engine, pytest.mark.reliability, pytest.mark.timeout(600)]

AGENTS = ("planner", "solver", "critic")
SESSIONS = tuple(f"session-{number}" for number in range(6))
REUSE = ReuseConfig(only_if_faster=False, idle_budget=0)
OPTIONS = ["--max-model-len", "2048", "--kv-cache-memory-bytes", str(128 << 20), "--reuse", REUSE.model_dump_json()]


class Replicas:
    """Two servers, the router before them, and a client of the router."""

    def __init__(self, servers: list[Served], client: Client) -> None:
        self.servers = servers
        self.client = client

    def ask(self, agent: str, session: str, *parts: Part, mode: Mode = Mode.AUTO) -> tuple[int, ...]:
        """One agent's turn; see ``reports`` for what became of it."""
        prompt = self.client.prompt(system(agent), *parts, END)
        answer = self.client.ask(prompt, agent=agent, session=session, tokens=8, mode=mode)
        self.report = answer.report
        return answer.content

    def turns(self, session: str) -> list[RequestReport]:
        """Three agents, each with the question and all answers before it."""
        asked = self.client.encode(f"In {session}: " + " ".join(QUESTIONS))
        shared: list[Part] = [("user_question", asked)]
        reports = []
        for agent in AGENTS:
            content = self.ask(agent, session, *shared)
            reports.append(self.report)
            shared += ["\nThen:\n", (f"agent:{agent}:response", content)]
        return reports

    def requests(self) -> list[int]:
        """Requests that each server has answered."""
        return [
            int(counts(server.root, "vllm:request_success_total", "finished_reason").total()) for server in self.servers
        ]

    def home(self, session: str) -> int:
        """The server that has a session: it counts a further request of it."""
        before = self.requests()
        self.ask("writer", session, "Anything.", mode=Mode.DENSE)
        grown = [after - count for after, count in zip(self.requests(), before, strict=True)]
        assert sum(grown) == 1
        return grown.index(1)


@pytest.fixture
def replicas(tiny_model: Path, tmp_path: Path) -> Iterator[Replicas]:
    with ExitStack() as stack:
        servers = [
            stack.enter_context(kvcomm_serve(tiny_model, OPTIONS, tmp_path / f"server-{number}.log"))
            for number in range(2)
        ]
        port = free_port()
        command = [sys.executable, "-m", "vllm_router.launch_router", "--policy", "consistent_hash", "--worker-urls"]
        command += [server.root for server in servers]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        command += ["--cb-failure-threshold", "1", "--health-check-interval-secs", "1"]
        log = stack.enter_context((tmp_path / "router.log").open("w"))
        router = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
        try:
            deadline = time.monotonic() + START_S
            while not healthy(f"http://127.0.0.1:{port}"):
                assert router.poll() is None, (tmp_path / "router.log").read_text()[-2000:]
                assert time.monotonic() < deadline
                time.sleep(0.1)
            engine = connect(tiny_model, f"http://127.0.0.1:{port}/v1")
            yield Replicas(servers, Client(engine))
            engine.close()
        finally:
            router.terminate()
            router.wait(30)


def test_a_session_stays_and_losing_its_replica_costs_a_dense_prefill(replicas: Replicas) -> None:
    for session in SESSIONS:
        first, *others = replicas.turns(session)
        assert first.loaded == 0
        for report in others:  # they are where the first agent's cache is
            assert report.loaded > 100, (session, report)
    homes = {session: replicas.home(session) for session in SESSIONS}
    assert set(homes.values()) == {0, 1}
    replicas.servers[0].kill()
    for session, home in homes.items():
        first, *others = replicas.turns(session)
        if home == 0:
            [question] = [part for part in first.segments if part.name == "user_question"]
            assert (question.exact, question.loaded) == (0, 0), "the other replica has never seen this session"
        else:
            assert first.exact + first.loaded > 100
        assert all(report.exact + report.loaded > 100 for report in others)
