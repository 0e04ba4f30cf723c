"""Tests of a Triton kernel: on a GPU, and on the CPU in Triton's interpreter, which needs Triton but no GPU.

Triton lies in a folder of its own (``make triton``), where nothing else finds it: vLLM and torch act differently when
they do. Triton also decides when it is imported whether it interprets. So a file of such tests runs once more in a
process of its own: see ``run_with_triton``. By hand: ``PYTHONPATH=.triton TRITON_INTERPRET=1 pytest FILE -k cpu``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRITON = Path(os.environ.get("TRITON_DIR", ROOT / ".triton"))
"""Where ``make triton`` puts Triton."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter only")),
]
"""Where a kernel may run."""

IMPORTABLE = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not (IMPORTABLE or (TRITON / "triton").is_dir()), reason="needs Triton in .triton: make triton"
)
importable_triton = pytest.mark.skipif(not IMPORTABLE, reason="runs where Triton can be imported")
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="not in Triton's interpreter")


def run_with_triton(file: str, which: str = "cpu", *, interpreted: bool = True) -> int:
    """Run tests of a file in a process that finds Triton; returns how many passed.

    Args:
        file: the file.
        which: as ``-k`` takes it; ``cpu``: those that are for the CPU.
        interpreted: in Triton's interpreter.
    """
    paths = os.pathsep.join(filter(None, [str(TRITON), os.environ.get("PYTHONPATH", "")]))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", which],
        env=os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": str(int(interpreted))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    return int(passed[1]) if passed else 0
