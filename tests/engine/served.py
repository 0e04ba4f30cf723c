"""A served engine for tests: ``kvcomm serve`` in a process of its own, with the handles that tests need on it.

``running`` gives one configuration's engine in this process or served, so that one test covers both.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.http.engine import HttpEngine
from kvcomm_integrations.engines.inprocess import InProcessEngine, SchedulerSnapshot
from kvcomm_integrations.engines.learned_state import StateSummary
from kvcomm_integrations.serve.state_client import order

ROOT = Path(__file__).parents[2]
STATE_FOLDERS: dict[str, Path] = {}
"""Where servers that ``kvcomm_serve`` has started keep state files, by address."""
BOTH = ("inprocess", "served")
"""Where an engine may be."""
BOTH_AT_LENGTH = ("inprocess", pytest.param("served", marks=pytest.mark.reliability))
"""Parameters of a fixture whose served engine is for reliability runs only, because its tests would take too long."""
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

    def reset_prefix_cache(self, *, references: bool = False, corrections: bool = False) -> bool:
        if corrections:
            self.clear_state()
        params = {"reset_external": str(references).lower()}
        return httpx.post(f"{self.root}/reset_prefix_cache", params=params, timeout=60).is_success

    @property
    def scheduler_snapshot(self) -> SchedulerSnapshot:
        text = httpx.get(f"{self.root}/metrics", timeout=60).text
        usage, running, waiting = (
            metric(text, name) for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
        )
        return SchedulerSnapshot(usage, int(running), int(waiting))

    def drain(self, timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while self.scheduler_snapshot.usage > 0:
            assert time.monotonic() < deadline, f"requests still hold blocks after {timeout} s"
            time.sleep(0.02)

    # The operator's routes name files in the server's own folder: what a test names elsewhere is copied.

    def save_state(self, path: str | Path, *, tenant: str | None = None) -> StateSummary:
        name = f"saved-{uuid.uuid4().hex}"
        done = StateSummary(**order(self.root, "save", {"name": name, "tenant": tenant}))
        shutil.copy(STATE_FOLDERS[self.root] / name, path)
        return done

    def load_state(self, path: str | Path, *, tenant: str | None = None, merge: bool = False) -> StateSummary:
        name = f"given-{uuid.uuid4().hex}"
        shutil.copy(path, STATE_FOLDERS[self.root] / name)
        return StateSummary(**order(self.root, "load", {"name": name, "tenant": tenant, "merge": merge}))

    def clear_state(self, *, tenant: str | None = None) -> StateSummary:
        return StateSummary(**order(self.root, "clear", {"tenant": tenant}))


def metric(text: str, name: str) -> float:
    """The sum of one of vLLM's series."""
    return sum(float(value) for value in re.findall(rf"^vllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE))


def samples(root: str) -> list[Sample]:
    """Everything on a server's ``/metrics`` page."""
    text = httpx.get(f"{root}/metrics", timeout=60).text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def counts(root: str, name: str, by: str) -> Counter[str]:
    """One of a server's series, summed by one of its labels."""
    found: Counter[str] = Counter()
    for sample in samples(root):
        if sample.name == name:
            found[sample.labels[by]] += sample.value
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", **more}


@dataclass(frozen=True)
class Served:
    """A running ``kvcomm serve``."""

    process: subprocess.Popen[str]
    port: int

    @property
    def root(self) -> str:
        """Its address, without ``/v1``."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Its address as chat models take it."""
        return f"{self.root}/v1"

    def family(self) -> list[psutil.Process]:
        """The command's process and all those below it."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def resident(self) -> int:
        """Bytes of memory of all its processes."""
        return sum(process.memory_info().rss for process in self.family())

    def kill(self) -> None:
        """End every process at once, as a machine that fails does."""
        for process in reversed(self.family()):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def serve_command(model: Path | str, options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "kvcomm_integrations.cli", "serve", str(model), "--host", "127.0.0.1", *options]


@contextmanager
def kvcomm_serve(model: Path, options: Sequence[str], log: Path, **variables: str) -> Iterator[Served]:
    """Run ``kvcomm serve`` until the block ends. It must stop well, too, unless it has been killed.

    Args:
        model: folder.
        options: of the command and of vLLM.
        log: where what it writes goes.
        variables: more of its environment.
    """
    port = free_port()
    exact = [] if "--dtype" in options else ["--dtype", "float32"]  # answers are compared token by token
    command = serve_command(model, ["--port", str(port), *exact, *options])
    folder = Path(tempfile.mkdtemp(dir=log.parent))
    given = environment(KVCOMM_STATE_DIR=str(folder), **variables)
    process = subprocess.Popen(command, env=given, stderr=subprocess.PIPE, text=True, cwd=log.parent)
    STATE_FOLDERS[f"http://127.0.0.1:{port}"] = folder
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
            yield Served(process, port)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
            drain.wait(10)
    finally:
        process.kill()
        process.wait()


def serve_options(config: EngineConfig) -> list[str]:
    """A configuration of an engine in this process, as options of ``kvcomm serve``."""
    fields = {
        "dtype": config.dtype,
        "max-model-len": config.max_model_len,
        "max-num-seqs": config.max_num_seqs,
        "block-size": config.block_size,
        "kv-cache-memory-bytes": config.kv_cache_bytes,
        "tensor-parallel-size": config.tensor_parallel_size,
        "seed": config.seed,
    } | {name.replace("_", "-"): value for name, value in config.engine_args.items()}
    options = ["--reuse", config.reuse.model_dump_json()]
    return options + [part for name, value in fields.items() if value is not None for part in (f"--{name}", str(value))]


@contextmanager
def running(kind: str, config: EngineConfig, folder: Path) -> Iterator[InProcessEngine | ServedEngine]:
    """The engine of a configuration, until the block ends.

    Args:
        kind: one of ``BOTH``: in this process, or behind ``kvcomm serve``.
        config: as for an engine in this process.
        folder: for the server's log.
    """
    if kind == "inprocess":
        engine = InProcessEngine(config)
        try:
            yield engine
        finally:
            engine.close()
        return
    with kvcomm_serve(Path(config.model), serve_options(config), folder / "server.log") as served:
        client = connect(config.model, served.url, reuse=config.reuse)  # what a client divides prompts by
        try:
            yield client
        finally:
            client.close()


def connect(model: Path | str, url: str, **fields: Any) -> ServedEngine:
    return ServedEngine(EngineConfig(model=str(model), base_url=url, **fields))
