"""What does the connector cost where nothing is reused? Plain vLLM against the connector switched off, and switched on.

Three engines with the same model run side by side and take turns, request by request, on prompts that nobody has seen:
time to the first token of one request, and tokens per second of several answers at once.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from statistics import median

from kvcomm_integrations.bench.harness import Answer, ask, progress, save_json, show
from kvcomm_integrations.bench.prompting import PaperTeam, Sizes, greedy
from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine, PlainEngine

PLAIN, OFF, ON = "plain vLLM", "connector, reuse off", "connector, nothing to reuse"
REST = 0.5
"""Pause before an engine's turn, seconds: the threads of the one before spin for a while after their work."""
LIMIT = 0.02
"""Most that the connector with reuse off may cost."""


def run_overhead(args: argparse.Namespace) -> int:
    """Run ``kvcomm bench overhead``; returns the exit status."""
    _share_cores_alike()
    shared = {"model": args.model, "max_model_len": args.prefix + args.input + args.output + 64, "seed": args.seed}
    engines = {
        PLAIN: PlainEngine(EngineConfig(**shared)),
        OFF: InProcessEngine(EngineConfig(**shared, reuse=ReuseConfig(enabled=False))),
        ON: InProcessEngine(EngineConfig(**shared)),
    }
    paces: dict[str, dict[str, list[float]]] = {name: {"ttft_ms": [], "tokens_per_s": []} for name in engines}
    with ExitStack() as stack:
        for engine in engines.values():
            stack.enter_context(closing(engine))
        step = stack.enter_context(progress("starting three engines", total=args.rounds + 1))
        team = PaperTeam(engines[PLAIN].tokenizer, 1, Sizes(args.prefix, args.input, args.output), args.seed)
        for number in range(-1, args.rounds):
            for name in list(engines) if number % 2 else list(engines)[::-1]:
                ttft_ms, tokens_per_s = _pace(engines[name], team, number, args.together)
                if number >= 0:
                    paces[name]["ttft_ms"].append(ttft_ms)
                    paces[name]["tokens_per_s"].append(tokens_per_s)
            step(f"measuring, round {min(number + 2, args.rounds)} of {args.rounds}", done=1)
    _show(paces, args)
    save_json(args, {"engines": paces})
    return 0


def _share_cores_alike() -> None:
    """Give every engine the same cores, unless the user has said which.

    Left to itself, vLLM keeps a core of a CPU for its scheduler and, where a KV connector is configured, one more for
    that; where it has too few it keeps none. The engines would differ by a core of products, not by our work.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))


def _pace(engine: InProcessEngine, team: PaperTeam, number: int, together: int) -> tuple[float, float]:
    """Milliseconds to the first token of one request; tokens per second of several answers at once."""
    first = 2 + number * (together + 1)
    time.sleep(REST)
    ttft_ms = _ask(engine, team, first, 1).ttft_ms
    questions = [first + 1 + place for place in range(together)]
    started = time.monotonic()
    with ThreadPoolExecutor(together) as pool:
        answers = pool.map(lambda question: _ask(engine, team, question, team.sizes.output), questions)
    tokens = sum(len(answer.tokens) for answer in answers)
    return ttft_ms, tokens / (time.monotonic() - started)


def _ask(engine: InProcessEngine, team: PaperTeam, question: int, tokens: int) -> Answer:
    [agent] = team.names
    prompt = team.write(agent, team.question(question), {})
    return ask(engine, prompt, greedy(tokens), agent, shared=True, session=f"overhead-{question}")


def _show(paces: dict[str, dict[str, list[float]]], args: argparse.Namespace) -> None:
    def cells(name: str, figure: str) -> tuple[str, str]:
        mine, plain = paces[name][figure], paces[PLAIN][figure]
        return f"{median(mine):.1f}", f"{median(a / b for a, b in zip(mine, plain, strict=True)):.3f}"

    title = f"Prompts of {args.prefix + args.input} tokens; {args.together} answers of {args.output} at once"
    headings = ("engine", "TTFT ms", "of plain", "tokens/s", "of plain")
    rows = [(name, *cells(name, "ttft_ms"), *cells(name, "tokens_per_s")) for name in paces]
    show(title, headings, rows, left="engine")
    print(f"Medians; of plain: median of the ratios, round by round. Within {LIMIT:.0%} is wanted with reuse off.")
