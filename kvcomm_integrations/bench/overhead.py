"""What does the connector cost where nothing is reused? Plain vLLM against the connector switched off, and switched on.

Three engines with the same model run side by side and take turns, request by request, on prompts that nobody has seen:
time to the first token of one request, and tokens per second of several answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvcomm_integrations.bench.paper_team import PaperTeam, Sizes
from kvcomm_integrations.bench.scores import as_config
from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine, PlainEngine
from kvcomm_integrations.engines.interface import GenerationRequest, SamplingOptions

PLAIN, OFF, ON = "plain vLLM", "connector, reuse off", "connector, nothing to reuse"
REST = 0.5
"""Pause before an engine's turn, seconds: the threads of the one before spin for a while after their work."""
LIMIT = 0.02
"""Most that the connector with reuse off may cost."""


@dataclass
class Pace:
    """Samples of one engine."""

    ttft_ms: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)


def run_overhead(args: argparse.Namespace) -> int:
    """Run ``kvcomm bench overhead``; returns the exit status."""
    _share_cores_alike()
    sizes = Sizes(args.prefix, args.input, args.output)
    shared = {"model": args.model, "max_model_len": args.prefix + args.input + args.output + 64, "seed": args.seed}
    engines = {
        PLAIN: PlainEngine(EngineConfig(**shared)),
        OFF: InProcessEngine(EngineConfig(**shared, reuse=ReuseConfig(enabled=False))),
        ON: InProcessEngine(EngineConfig(**shared)),
    }
    paces = {name: Pace() for name in engines}
    try:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("starting three engines", total=args.rounds)
            team = PaperTeam(engines[PLAIN].tokenizer, 1, sizes, args.seed)
            for number in range(-1, args.rounds):
                order = list(engines) if number % 2 else list(engines)[::-1]
                for name in order:
                    pace = paces[name] if number >= 0 else Pace()
                    _ask(engines[name], team, number, args.together, pace)
                progress.update(task, advance=1, description="measuring")
    finally:
        for engine in engines.values():
            engine.close()
    _show(paces, args)
    if args.json is not None:
        result = {"engines": {name: vars(pace) for name, pace in paces.items()}, "config": as_config(args)}
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def _share_cores_alike() -> None:
    """Give every engine the same cores, unless the user has said which.

    Left to itself, vLLM keeps a core of a CPU for its scheduler and, where a KV connector is configured, one more for
    that; where it has too few it keeps none. The engines would differ by a core of products, not by our work.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))


def _ask(engine: InProcessEngine, team: PaperTeam, number: int, together: int, pace: Pace) -> None:
    """One request for its first token, then several answers at once."""
    first = 2 + number * (together + 1)
    time.sleep(REST)
    *_, last = engine.generate_sync(_request(team, first, 1))
    pace.ttft_ms.append(last.ttft_ms or 0.0)
    requests = [_request(team, first + 1 + place, team.sizes.output) for place in range(together)]
    started = time.monotonic()
    with ThreadPoolExecutor(together) as pool:
        tokens = sum(pool.map(lambda request: sum(len(d.token_ids) for d in engine.generate_sync(request)), requests))
    pace.tokens_per_s.append(tokens / (time.monotonic() - started))


def _request(team: PaperTeam, number: int, tokens: int) -> GenerationRequest:
    [agent] = team.names
    prompt = team.write(agent, team.question(number), {})
    params = prompt.params(agent=agent, session=f"overhead-{number}", response_name=f"agent:{agent}:response")
    sampling = SamplingOptions(max_tokens=tokens, min_tokens=tokens, temperature=0, ignore_eos=True)
    return GenerationRequest(prompt, params, sampling)


def _show(paces: dict[str, Pace], args: argparse.Namespace) -> None:
    table = Table(
        title=f"Prompts of {args.prefix + args.input} tokens; {args.together} answers of {args.output} at once"
    )
    for column in ("engine", "TTFT ms", "of plain", "tokens/s", "of plain"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name, pace in paces.items():
        table.add_row(
            name,
            f"{median(pace.ttft_ms):.1f}",
            f"{_ratio(pace.ttft_ms, paces[PLAIN].ttft_ms):.3f}",
            f"{median(pace.tokens_per_s):.1f}",
            f"{_ratio(pace.tokens_per_s, paces[PLAIN].tokens_per_s):.3f}",
        )
    console = Console(width=120)
    console.print(table)
    console.print(
        f"Medians; of plain: median of the ratios, round by round. Within {LIMIT:.0%} is wanted with reuse off."
    )


def _ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return median(a / b for a, b in zip(mine, theirs, strict=True))
