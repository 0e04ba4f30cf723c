"""vLLM as it is, without our connector, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    model, tokens, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    prompts = json.loads(sys.stdin.read())
    llm = LLM(model, max_model_len=1024, kv_cache_memory_bytes=1 << 28, **options)
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    answers = []
    for prompt in prompts:
        llm.reset_prefix_cache()
        answers += llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    print("RESULT" + json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))

if __name__ == "__main__":
    main()
"""


def plain_answers(
    model: Path, prompts: Sequence[Sequence[int]], tokens: int, folder: Path, **options: Any
) -> list[tuple[int, ...]]:
    """Greedy answers of exactly ``tokens`` tokens, each prompt on its own with an empty prefix cache.

    Args:
        model: folder.
        prompts: token ids.
        tokens: of each answer.
        folder: for the script.
        options: of ``LLM``; in float32 and without compilation if they do not say otherwise.
    """
    options = {"dtype": "float32", "enforce_eager": True} | options
    script = folder / "plain.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(model), str(tokens), json.dumps(options)],
        input=json.dumps([list(prompt) for prompt in prompts]),
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return [tuple(ids) for ids in json.loads(line.removeprefix("RESULT"))]
