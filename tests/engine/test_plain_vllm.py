"""Invariant 1 against the real thing: vLLM without our connector gives the same tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvcomm_integrations.wire import Mode
from tests.engine.helpers import END, QUESTIONS, ROLES, Client, system

pytestmark = [pytest.mark.engine, pytest.mark.served(at_length=True)]

PLAIN = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    model, prompts = sys.argv[1], json.loads(sys.stdin.read())
    llm = LLM(model, dtype="float32", max_model_len=2048, enforce_eager=True, kv_cache_memory_bytes=1 << 30)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(max_tokens=16, temperature=0))
    print("RESULT" + json.dumps([list(o.outputs[0].token_ids) for o in outputs]))

if __name__ == "__main__":
    main()
"""


def test_dense_and_observed_requests_equal_plain_vllm(client: Client, tmp_path: Path, session: str) -> None:
    import json

    prompts = [
        client.prompt(system(agent), ("user_question", client.encode(question)), END)
        for agent in ROLES
        for question in QUESTIONS
    ]
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    done = subprocess.run(
        [sys.executable, str(script), client.engine.config.model],
        input=json.dumps([p.token_ids for p in prompts]),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    plain = [tuple(ids) for ids in json.loads(line.removeprefix("RESULT"))]
    for mode in (Mode.DENSE, Mode.OBSERVE):
        ours = [
            client.ask(p, agent="x", session=session + mode, mode=mode, salt=session + mode, tokens=16).ids
            for p in prompts
        ]
        assert ours == plain
