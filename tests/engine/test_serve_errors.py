"""``kvcomm serve`` where it cannot serve: one clear error with the value and a remedy, and no process left behind.

What can be told without vLLM is in ``tests/server/test_serve_command.py``; here vLLM itself is started and refuses.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.served import environment, free_port, serve_command

pytestmark = pytest.mark.engine

MARK = "KVCOMM_TEST_MARK"
"""Environment variable by which a command's processes are known, whatever they call themselves."""
FAST_S = 60
"""Longest time until a model that vLLM does not know is refused on a busy machine, seconds: no weight is read."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    lines: list[str]
    """What it wrote to standard error."""
    seconds: float
    mark: str

    @property
    def error(self) -> str:
        return self.lines[-1]

    def survivors(self) -> list[psutil.Process]:
        """Processes that were started by it and still run."""
        return [process for process in psutil.process_iter() if _mark(process) == self.mark]


def _mark(process: psutil.Process) -> str | None:
    with suppress(psutil.Error):
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.environ().get(MARK)
    return None


def serve(model: Path | str, *options: str, **variables: str) -> Ended:
    """Run ``kvcomm serve``, which has to end by itself."""
    if "--port" not in options:
        options = (*options, "--port", str(free_port()))
    mark, started = uuid.uuid4().hex, time.monotonic()
    done = subprocess.run(
        serve_command(model, options),
        env=environment(**{MARK: mark}, **variables),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.stdout == ""
    return Ended(done.returncode, done.stderr.splitlines(), time.monotonic() - started, mark)


def check(ended: Ended, *patterns: str) -> None:
    """It ended with an error of one line that holds all patterns, and left nothing."""
    assert ended.status not in (0, None)
    assert ended.status > 0, f"killed by signal {-ended.status}"
    assert ended.error.startswith("kvcomm: ")
    for pattern in patterns:
        assert re.search(pattern, ended.error), ended.error
    assert not any("Traceback" in line for line in ended.lines)
    assert len(ended.lines) <= 2, ended.lines  # "starting", and the error
    assert ended.survivors() == []


@pytest.fixture
def changed(tiny_model: Path, tmp_path: Path) -> Iterator[Any]:
    """Makes a copy of the tiny model with other values in its configuration."""

    def make(**fields: Any) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        for file in tiny_model.iterdir():
            if file.name != "config.json":
                (folder / file.name).symlink_to(file)
        config = json.loads((tiny_model / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))
        return folder

    yield make
    shutil.rmtree(tmp_path / "model", ignore_errors=True)


def test_an_architecture_that_vllm_does_not_know(changed: Any) -> None:
    ended = serve(changed(architectures=["NoSuchForCausalLM"]))
    check(ended, r"NoSuchForCausalLM", "Remedy: vLLM cannot run this model; see its list")
    assert ended.seconds < FAST_S


@pytest.mark.reliability
def test_a_kind_of_model_that_nobody_knows(changed: Any) -> None:
    check(serve(changed(model_type="nosuch")), "`nosuch`", "Remedy: vLLM cannot run this model")


@pytest.mark.reliability
def test_an_encoder_has_no_kv_to_reuse(changed: Any) -> None:
    folder = changed()
    for file in folder.glob("*.safetensors"):
        file.unlink()
    transformers = pytest.importorskip("transformers")
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=vocabulary, **sizes))
    model.save_pretrained(folder)
    check(serve(folder), "cannot be reused: the model keeps no KV cache", "--allow-dense")


def test_a_port_that_is_taken(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        check(serve(tiny_model, "--port", port), f"port {port}: Address already in use", "another with --port")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    check(serve(tmp_path / "nowhere"), "nowhere' does not exist", "give a folder with weights, or a hub id")


def test_a_model_of_the_hub_without_the_hub() -> None:
    check(serve("some-company/no-such-model"), "some-company/no-such-model", "Remedy: .*unset HF_HUB_OFFLINE")


@pytest.mark.reliability
def test_a_cache_too_small_for_one_prompt(tiny_model: Path) -> None:
    ended = serve(tiny_model, "--max-model-len", "2048", "--kv-cache-memory-bytes", "1000000")
    check(ended, r"\(2048\)", "Remedy: give the cache more memory with --kv-cache-memory-bytes, or .*--max-model-len")


@pytest.mark.reliability
def test_a_cache_larger_than_the_memory(tiny_model: Path) -> None:
    ended = serve(tiny_model, "--kv-cache-memory-bytes", str(900 << 30))
    check(ended, r"900.0* GiB", "Remedy: there is too little memory .*lower --kv-cache-memory-bytes")


@pytest.mark.reliability
def test_prompts_longer_than_the_model_takes(tiny_model: Path) -> None:
    check(serve(tiny_model, "--max-model-len", "999999"), r"999999", r"Remedy: lower --max-model-len")
