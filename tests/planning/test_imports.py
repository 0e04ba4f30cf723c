"""Planning needs neither torch nor vLLM, so it is tested in milliseconds and used by ``kvcomm explain``."""

from __future__ import annotations

import subprocess
import sys


def test_planning_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, kvcomm_integrations.planning.forecast, kvcomm_integrations.planning.job_writer\n"
        "sys.exit(', '.join(name for name in ('torch', 'vllm', 'transformers') if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
