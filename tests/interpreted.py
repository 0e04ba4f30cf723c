"""Tests of a Triton kernel: on a GPU, and on the CPU in Triton's interpreter, which needs Triton but no GPU.

Triton decides when it is imported, so a file of such tests runs once more in a process of its own: see
``run_interpreted``. By hand: ``pip install --no-deps --target DIR triton``, then ``PYTHONPATH=DIR pytest FILE``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter only")),
]
"""Where a kernel may run."""

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="not in Triton's interpreter")


def run_interpreted(file: str) -> int:
    """Run the tests of a file that are for the CPU in Triton's interpreter; returns how many passed."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", "cpu"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    return int(passed[1]) if passed else 0
