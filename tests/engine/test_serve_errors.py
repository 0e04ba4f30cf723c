"""``kvcomm serve`` where vLLM itself cannot start or nothing could be reused: one clear error, nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.served import environment, free_port

pytestmark = pytest.mark.engine


def changed(tiny_model: Path, folder: Path, **config: Any) -> Path:
    """The tiny model with other words in its configuration."""
    for path in tiny_model.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    known = json.loads((tiny_model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, **config}))
    return folder


def serve(model: Path, *options: str) -> tuple[int, list[str]]:
    """Exit status and what was said, after checking that no process of the server is left."""
    port = str(free_port())
    command = [sys.executable, "-m", "kvcomm_integrations.cli", "serve", str(model), "--host", "127.0.0.1"]
    done = subprocess.run(
        [*command, "--port", port, "--max-model-len", "512", *options],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env=environment(),
        cwd=model,
    )
    left = [p for p in psutil.process_iter(["cmdline", "cwd"]) if p.info["cwd"] == str(model)]
    assert left == []
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("config", "options", "pattern"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, (), "vLLM cannot run this model"),
        ({}, ("--kv-cache-memory-bytes", "100000"), "--kv-cache-memory-bytes"),
        ({}, ("--no-such-option",), "unrecognized arguments: --no-such-option"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}, (), "--allow-dense"),
    ],
)  # fmt: skip
def test_one_clear_error(
    tiny_model: Path, tmp_path: Path, config: dict[str, Any], options: tuple[str, ...], pattern: str
) -> None:
    status, lines = serve(changed(tiny_model, tmp_path, **config), *options)
    assert status == 2, lines
    assert len(lines) == 2, lines
    assert lines[0].startswith("kvcomm: starting vLLM")
    assert lines[1].startswith("kvcomm: ")
    assert pattern in lines[1]
