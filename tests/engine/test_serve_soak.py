"""Many clients on one server for minutes: no error, no growth, reports that agree with the server's counts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import socket
import statistics
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from kvcomm_integrations.wire import RequestReport
from tests.engine.helpers import END, QUESTIONS, Client, system
from tests.engine.served import ServedEngine, connect, kvcomm_serve

pytestmark = [pytest.mark.engine, pytest.mark.reliability]

CLIENTS = 32
AGENTS = ("planner", "solver", "critic")
SECONDS = float(os.environ.get("KVCOMM_SOAK_S", "120"))
TOKENS = 6
GROWTH = 1.05
"""Largest growth of the server's memory after warm-up."""
OPTIONS = ["--max-model-len", "1024", "--max-num-seqs", "32", "--kv-cache-memory-bytes", str(256 << 20)]
REUSE = '{"store_bytes": 33554432, "state_bytes": 33554432, "session_ttl_s": 5}'


@dataclass
class Soak:
    """What the clients and the watcher have noted."""

    reports: list[RequestReport] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


async def _client(client: Client, number: int, until: float, soak: Soak) -> None:
    draw, turn = random.Random(number), 0
    while time.monotonic() < until:
        turn += 1
        session = f"{number}-{turn}"
        parts: list[str | tuple[str, tuple[int, ...]]] = [
            ("user_question", client.encode(f"{draw.choice(QUESTIONS)} Case {session}."))
        ]
        for agent in AGENTS:
            request = client.request(
                client.prompt(system(agent), *parts, END), agent=agent, session=session, tokens=TOKENS
            )
            answer = await client.arun(request)
            soak.reports.append(answer.report)
            parts += ["\n", (f"agent:{agent}:response", answer.content)]


async def _watch(until: float, soak: Soak) -> None:
    while time.monotonic() < until:
        await asyncio.sleep(1)
        soak.memory.append(server_memory())


def server_memory() -> int:
    """Bytes of all processes below this one: the supervisor, vLLM's server, its engine and worker."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def counted(engine: ServedEngine) -> dict[str, int]:
    """The server's own count of prompt tokens by what became of them."""
    text = httpx.get(f"{engine.root}/metrics", timeout=60).text
    found = re.findall(r'^vllm:kvcomm_prompt_tokens_total{.*treatment="(\w+)".*} (\S+)$', text, re.MULTILINE)
    totals: dict[str, int] = {}
    for name, value in found:
        totals[name] = totals.get(name, 0) + int(float(value))
    return totals


def _kill_in_the_middle(engine: ServedEngine, client: Client, number: int) -> None:
    """Begin a stream and vanish as a killed process does: the connection is reset."""
    from kvcomm_integrations.engines.http.streaming import completion_body

    prompt = client.prompt(system("solver"), ("user_question", client.encode(f"{QUESTIONS[0]} Kill {number}.")), END)
    request = client.request(prompt, agent="solver", session=f"killed-{number % 4}", tokens=400)
    body = httpx.Request("POST", f"{engine.root}/v1/completions", json=completion_body(request, engine.server, "k"))
    address = urlsplit(engine.root)
    with socket.create_connection((address.hostname, address.port), 30) as connection:
        head = "".join(f"{name}: {value}\r\n" for name, value in body.headers.items())
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + body.content)
        if number % 3:
            connection.recv(64)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _free_again(engine: ServedEngine, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        snapshot = engine.scheduler_snapshot
        if (snapshot.usage, snapshot.running, snapshot.waiting) == (0, 0, 0):
            return True
        time.sleep(0.2)
    return False


@pytest.mark.timeout(SECONDS + 300)
def test_clients_for_minutes(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kvcomm_serve(tiny_model, [*OPTIONS, "--reuse", REUSE], tmp_path / "log") as url:
        engine = connect(tiny_model, url)
        client, soak = Client(engine), Soak()

        async def everyone() -> None:
            until = time.monotonic() + SECONDS
            await asyncio.gather(_watch(until, soak), *(_client(client, n, until, soak) for n in range(CLIENTS)))

        asyncio.run(everyone())
        assert _free_again(engine)
        totals = counted(engine)
        for name in ("exact", "loaded", "repaired", "computed"):
            assert sum(getattr(report, name) for report in soak.reports) == totals.get(name, 0), name
        quarter = len(soak.memory) // 4
        early, late = statistics.median(soak.memory[quarter : 2 * quarter]), statistics.median(soak.memory[-quarter:])
        loaded = sum(report.loaded for report in soak.reports)
        with capsys.disabled():
            print(
                f"\nsoak: {CLIENTS} clients, {SECONDS:.0f} s, {len(soak.reports)} requests, {loaded} tokens loaded of "
                f"{sum(totals.values())}, server memory {early / 2**20:.0f} -> {late / 2**20:.0f} MiB"
            )
        assert loaded > 0
        assert late <= early * GROWTH
        for number in range(24):
            _kill_in_the_middle(engine, client, number)
        assert _free_again(engine)
        answer = client.run(
            client.request(client.prompt(system("critic"), ("user_question", client.encode("x" * 50)), END))
        )
        assert answer.last.finish_reason in ("stop", "length")
        engine.close()
