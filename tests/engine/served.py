"""A served engine for tests: ``kvcomm serve`` in a process of its own, with the handles that tests need on it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.http.engine import HttpEngine
from kvcomm_integrations.engines.stats import SchedulerSnapshot

ROOT = Path(__file__).parents[2]
START_S = 250
"""Longest start of a server, seconds: many times what an idle machine needs."""


class ServedEngine(HttpEngine):
    """The HTTP engine with the in-process engine's handles for tests, by way of vLLM's development routes."""

    @property
    def root(self) -> str:
        return str(self.config.base_url).removesuffix("/v1")

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        answer = httpx.post(f"{self.root}/collective_rpc", json={"method": method, "args": list(args)}, timeout=120)
        answer.raise_for_status()
        return list(answer.json()["results"])

    def reset_prefix_cache(self, *, references: bool = False) -> bool:
        params = {"reset_external": str(references).lower()}
        return httpx.post(f"{self.root}/reset_prefix_cache", params=params, timeout=60).is_success

    @property
    def scheduler_snapshot(self) -> SchedulerSnapshot:
        text = httpx.get(f"{self.root}/metrics", timeout=60).text
        usage, running, waiting = (
            metric(text, name) for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
        )
        return SchedulerSnapshot(usage, int(running), int(waiting))


def metric(text: str, name: str) -> float:
    """The sum of one of vLLM's series."""
    return sum(float(value) for value in re.findall(rf"^vllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", **more}


@contextmanager
def kvcomm_serve(model: Path, options: Sequence[str], log: Path) -> Iterator[str]:
    """Run ``kvcomm serve`` until the block ends; gives its address. It must stop well, too."""
    port = free_port()
    command = [sys.executable, "-m", "kvcomm_integrations.cli", "serve", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), *options]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True, cwd=log.parent)
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("kvcomm: serving"):
                break
        else:
            raise AssertionError("".join(lines))
        with log.open("w") as file:
            drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=file)
            yield f"http://127.0.0.1:{port}/v1"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            drain.wait(10)
    finally:
        process.kill()
        process.wait()


def connect(model: Path | str, url: str, **fields: Any) -> ServedEngine:
    return ServedEngine(EngineConfig(model=str(model), base_url=url, **fields))
