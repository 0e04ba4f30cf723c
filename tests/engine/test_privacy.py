"""What was said appears in no log, even where everything is logged; tenants get the same with and without others.

Each test starts what it reads the log of, so it runs in one form only. Tenants of a server: ``test_serving.py``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

SCRIPT = """
import logging, sys
from dataclasses import replace
logging.basicConfig(level=logging.DEBUG)
from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.wire import Mode
from tests.engine.helpers import END, Client, system

def main():
    model, secret = sys.argv[1:]
    reuse = ReuseConfig(only_if_faster=False, policy="ridge", idle_budget=0)
    engine = InProcessEngine(EngineConfig(
        dtype="float32", model=model, max_model_len=512, kv_cache_bytes=1 << 28, reuse=reuse
    ))
    client = Client(engine)
    content = client.encode(secret)
    loaded = 0
    for number, role in enumerate(["planner", "solver", "critic"]):
        prompt = client.prompt(system(role), ("user_question", content), END)
        loaded += client.ask(prompt, agent=f"a{number}", session="s").report.loaded
    engine.reset_prefix_cache()
    dense = client.request(prompt, agent="a2", session="s", mode=Mode.OBSERVE)  # learned from, and audited
    client.run(replace(dense, params=dense.params.model_copy(update={"audit": ("ridge",)})))
    engine.drain()
    audits = engine.call_workers("kvcomm_take_audits")[0]
    engine.reset_prefix_cache()
    engine.call_workers("kvcomm_inject_fault", "correct", "raise", 1)
    client.ask(prompt, agent="b", session="s")
    engine.close()
    print("LOADED", loaded, "AUDITS", len(audits))

if __name__ == "__main__":
    main()
"""
SECRET = " ".join(f"The code of locker {i} is swordfish-{i}, not halibut-{i + 7}." for i in range(40, 46))


def test_nothing_of_a_prompt_is_logged_at_debug(tiny_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "said.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_model), SECRET],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "DEBUG", "PYTHONPATH": os.getcwd(), "KVCOMM_FAULT_INJECTION": "1"},
    )
    said = done.stdout + done.stderr
    [(loaded, audits)] = re.findall(r"LOADED (\d+) AUDITS (\d+)", said)
    assert int(loaded) > 0
    assert int(audits) > 0
    assert "injected fault" in said  # the workers' logs are among what is looked at
    assert "DEBUG" in said
    assert not re.search("swordfish|halibut|locker", said)
