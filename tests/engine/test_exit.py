"""A script that just ends leaves no process behind, whatever it has forked, and equal chat models start one engine.

Of this process only: what servers leave behind is in ``test_serve_errors`` and ``tests/server/test_serve_command.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.engine

SCRIPT = """
import json, os, signal, sys
import psutil
from kvcomm_integrations import ChatKVComm

def child(work, leave):
    pid = os.fork()
    if not pid:
        signal.alarm(30)
        work()
        leave()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

def refused(model):
    try:
        model.invoke("Hello")
    except Exception as error:
        assert type(error).__name__ == "EngineForkedError", error
    else:
        raise AssertionError("the child has used its parent's engine")

def main():
    make = lambda: ChatKVComm(model=sys.argv[1], max_model_len=512, max_tokens=4, temperature=0)
    first, second = make(), make()
    assert first.invoke("Hello").content == second.invoke("Hello").content
    assert first.runtime is second.runtime
    for work in (lambda: None, lambda: refused(first), lambda: refused(make())):
        child(work, lambda: sys.exit(0))
        child(work, lambda: os._exit(0))
    assert first.invoke("Hello").content == second.invoke("Hello").content
    print("CHILDREN" + json.dumps([p.pid for p in psutil.Process().children(recursive=True)]))

if __name__ == "__main__":
    main()
"""


def test_no_process_outlives_the_script(tiny_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "app.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_model)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("CHILDREN"))
    children = json.loads(line.removeprefix("CHILDREN"))
    assert children
    deadline = time.monotonic() + 15
    while any(map(psutil.pid_exists, children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, children))
    assert "Traceback" not in done.stderr
