"""Replicas behind vLLM's own router: a session stays on one of them, and losing one costs a dense prefill, no more."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.http.engine import HttpEngine
from kvcomm_integrations.engines.interface import Delta, GenerationRequest, SamplingOptions
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.serve.supervisor import healthy
from kvcomm_integrations.wire import SESSION_HEADER
from tests.server.stub import MODEL, Stub, running

pytest.importorskip("vllm_router")

SESSIONS = [f"session-{number}" for number in range(8)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Replicas:
    """Two stubs behind the router."""

    def __init__(self, tokenizer: ChatTokenizer, folder: Path) -> None:
        self.stubs = [Stub(tokenizer), Stub(tokenizer)]
        self.stacks = [ExitStack(), ExitStack()]
        for stack, stub in zip(self.stacks, self.stubs, strict=True):
            stack.enter_context(running(stub))
        port = free_port()
        command = [sys.executable, "-m", "vllm_router.launch_router", "--policy", "consistent_hash", "--worker-urls"]
        command += [stub.url.removesuffix("/v1") for stub in self.stubs]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        command += ["--cb-failure-threshold", "1", "--health-check-interval-secs", "1"]
        self.log = (folder / "router.log").open("w")
        self.router = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=dict(os.environ))
        deadline = time.monotonic() + 60
        while not healthy(f"http://127.0.0.1:{port}"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        config = EngineConfig(model=MODEL, base_url=f"http://127.0.0.1:{port}/v1")
        self.engine = HttpEngine(config, tokenizer)

    def ask(self, agent: str, session: str) -> Delta:
        prompt = SegmentedPrompt(tuple(range(100, 112)), ())
        params = prompt.params(agent=agent, session=session)
        *_, last = self.engine.generate_sync(GenerationRequest(prompt, params, SamplingOptions(max_tokens=3)))
        return last

    def placed(self) -> list[set[str]]:
        """Session headers that each replica has seen."""
        return [{seen.headers[SESSION_HEADER.lower()] for seen in stub.completions()} for stub in self.stubs]

    def close(self) -> None:
        self.engine.close()
        self.router.terminate()
        self.router.wait(30)
        self.log.close()
        for stack in self.stacks:
            stack.close()


@pytest.fixture
def replicas(tokenizer: ChatTokenizer, tmp_path: Path) -> Iterator[Replicas]:
    made = Replicas(tokenizer, tmp_path)
    yield made
    made.close()


def test_every_agent_of_a_session_reaches_the_same_replica(replicas: Replicas) -> None:
    reports = [replicas.ask(agent, session).report for session in SESSIONS for agent in ("a", "b", "c")]
    assert all(report is not None and report.loaded == 2 for report in reports)
    first, second = replicas.placed()
    assert first
    assert second
    assert not first & second
    assert len(first | second) == len(SESSIONS)


def test_losing_a_replica_loses_no_request(replicas: Replicas) -> None:
    for session in SESSIONS:
        replicas.ask("a", session)
    replicas.stacks[1].close()
    assert {replicas.ask("b", session).finish_reason for session in SESSIONS} == {"stop"}
    assert len(replicas.placed()[0]) == len(SESSIONS)
