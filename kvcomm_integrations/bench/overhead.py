"""What does the connector cost where nothing is reused? Plain vLLM against the connector switched off, and switched on.

Three engines with the same model, each in a process of its own, take turns, request by request, on prompts that nobody
has seen: time to the first token of one request, and tokens per second of several answers at once. Plain vLLM is given
the same arguments here: what differs is the connector alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from statistics import median

from kvcomm_integrations.bench.harness import Answer, ask, progress, save_json, show
from kvcomm_integrations.bench.plain import EngineProcess, rest, share_cores
from kvcomm_integrations.bench.prompting import PaperTeam, Sizes, greedy
from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine, PlainEngine
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer

PLAIN, OFF, ON = "plain vLLM", "connector, reuse off", "connector, nothing to reuse"
LIMIT = 0.02
"""Most that the connector with reuse off may cost."""


def run_overhead(args: argparse.Namespace) -> int:
    """Run ``kvcomm bench overhead``; returns the exit status."""
    share_cores()
    shared = {"model": args.model, "max_model_len": args.prefix + args.input + args.output + 64, "seed": args.seed}
    kinds = {
        PLAIN: (PlainEngine, EngineConfig(**shared)),
        OFF: (InProcessEngine, EngineConfig(**shared, reuse=ReuseConfig(enabled=False))),
        ON: (InProcessEngine, EngineConfig(**shared)),
    }
    sizes = Sizes(args.prefix, args.input, args.output)
    team = PaperTeam(ChatTokenizer.from_pretrained(args.model), 1, sizes, args.seed)
    [agent] = team.names
    paces: dict[str, dict[str, list[float]]] = {name: {"ttft_ms": [], "tokens_per_s": []} for name in kinds}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(closing(EngineProcess(*kind))) for name, kind in kinds.items()}
        step = stack.enter_context(progress("starting three engines", total=args.rounds + 1))
        for number in range(-1, args.rounds):
            first = 2 + number * (args.together + 1)
            prompts = [team.write(agent, team.question(first + place), {}) for place in range(args.together + 1)]
            for name in list(engines) if number % 2 else list(engines)[::-1]:
                rest()
                ttft_ms, tokens_per_s = engines[name].call(_pace, prompts, agent, args.output)
                if number >= 0:
                    paces[name]["ttft_ms"].append(ttft_ms)
                    paces[name]["tokens_per_s"].append(tokens_per_s)
            step(f"measuring, round {min(number + 2, args.rounds)} of {args.rounds}", done=1)
    _show(paces, args)
    save_json(args, {"engines": paces})
    return 0


def _pace(engine: InProcessEngine, prompts: Sequence[SegmentedPrompt], agent: str, tokens: int) -> tuple[float, float]:
    """Milliseconds to the first token of the first prompt; tokens per second of answers to all others at once."""

    def answer(prompt: SegmentedPrompt, tokens: int = tokens) -> Answer:
        session = f"overhead-{hash(prompt.token_ids)}"
        return ask(engine, prompt, greedy(tokens), agent, shared=True, session=session)

    ttft_ms = answer(prompts[0], 1).ttft_ms
    started = time.monotonic()
    with ThreadPoolExecutor(len(prompts) - 1) as pool:
        count = sum(len(found.tokens) for found in pool.map(answer, prompts[1:]))
    return ttft_ms, count / (time.monotonic() - started)


def _show(paces: dict[str, dict[str, list[float]]], args: argparse.Namespace) -> None:
    def cells(name: str, figure: str) -> tuple[str, str]:
        mine, plain = paces[name][figure], paces[PLAIN][figure]
        return f"{median(mine):.1f}", f"{median(a / b for a, b in zip(mine, plain, strict=True)):.3f}"

    title = f"Prompts of {args.prefix + args.input} tokens; {args.together} answers of {args.output} at once"
    headings = ("engine", "TTFT ms", "of plain", "tokens/s", "of plain")
    rows = [(name, *cells(name, "ttft_ms"), *cells(name, "tokens_per_s")) for name in paces]
    show(title, headings, rows, left="engine")
    print(f"Medians; of plain: median of the ratios, round by round. Within {LIMIT:.0%} is wanted with reuse off.")
