"""Tests of the engine once more on vLLM's second-generation model runner, which GPUs use, in Triton's interpreter.

That runner needs Triton with a backend. ``standin`` beside this file is one that compiles nothing; vLLM's own kernels
then run in Triton's interpreter, about half a second a step. All tests run in one process, on one engine for each
configuration; what they say is shown by file. By hand, from the repository's root::

    PYTHONPATH=.triton:tests/v2_runner/standin TRITON_INTERPRET=1 TRITON_DEFAULT_BACKEND=cpu \\
        VLLM_USE_V2_MODEL_RUNNER=1 pytest tests/engine/test_repair_exact.py -k inprocess
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
TRITON = Path(os.environ.get("TRITON_DIR", ROOT / ".triton"))
STANDIN = Path(__file__).parent / "standin"

TESTS = {
    "test_repair_exact": "",
    "test_reuse": "second_agent or never_enters or came_from or sessions or dense_mode",
    "test_carried": "does_not_grow",
    "test_small_engine": "chunked or preemption or bit_exact or seed or 300",
    "test_tensor_parallel": "",
    "test_faults": "load_fails and (correct or repair)",
}
"""Files of ``tests/engine`` and which of their tests, as ``-k`` takes it."""

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not (TRITON / "triton").is_dir(), reason="needs Triton in .triton: make triton"),
]


def environment() -> dict[str, str]:
    """What makes vLLM choose the second-generation runner on a CPU."""
    paths = [str(TRITON), str(STANDIN), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TRITON_INTERPRET": "1",
        "TRITON_DEFAULT_BACKEND": "cpu",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """Of each file, the tests that ran, and what went wrong in each."""
    report = tmp_path_factory.mktemp("second") / "report.xml"
    files = [f"tests/engine/{name}.py" for name in TESTS]
    wanted = " or ".join(f"({name}.py and ({which or 'test'}))" for name, which in TESTS.items())
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *files),
            *("-k", f"(inprocess or not served) and ({wanted})"),
        ],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert report.exists(), run.stdout[-3000:] + run.stderr[-3000:]
    found: dict[str, list[tuple[str, str]]] = {name: [] for name in TESTS}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            wrong = [*case.iter("failure"), *case.iter("error")]
            text = "\n".join(f"{part.get('message')}\n{(part.text or '')[-3000:]}" for part in wrong)
            found[str(case.get("classname")).rpartition(".")[2]].append((str(case.get("name")), text))
    return found


@pytest.mark.parametrize("name", TESTS)
def test_the_engines_tests_pass_on_the_second_generation_runner(
    outcomes: dict[str, list[tuple[str, str]]], name: str
) -> None:
    ran = outcomes[name]
    assert ran, "none of them ran"
    failed = {test: text for test, text in ran if text}
    assert not failed, "\n\n".join(f"{test}: {text}" for test, text in failed.items())


def test_the_environment_chooses_the_second_generation_runner(tiny_model: Path) -> None:
    script = (
        "import sys; from kvcomm_integrations.config import EngineConfig\n"
        "from kvcomm_integrations.engines.vllm_args import engine_args\n"
        "config = engine_args(EngineConfig(model=sys.argv[1])).create_engine_config()\n"
        "print('second generation:', config.use_v2_model_runner)"
    )
    command = [sys.executable, "-c", script, str(tiny_model)]
    told = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=True)
    assert "second generation: True" in told.stdout
