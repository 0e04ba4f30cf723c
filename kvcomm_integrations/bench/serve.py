"""How does the engine serve many teams at once? Sessions arrive and are timed, densely and with reuse, by turns.

Dense is plain vLLM in a process of its own, with its own defaults, or dense requests in the engine that also reuses.

A session is a team in the order of its graph: each agent reads the question and the answers of the agents it hears.
Closed loop: so many sessions are always under way. Open loop: sessions arrive by chance (Poisson), however long those
before them take, at most ``concurrency`` at once.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import mean
from typing import Any

from kvcomm_integrations.bench.harness import ask, percentile, progress, save_json, show
from kvcomm_integrations.bench.plain import compared, rest
from kvcomm_integrations.bench.prompting import Ids, PaperTeam, Sizes
from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.wire import Mode

GRAPHS: dict[str, Callable[[int], range]] = {
    "full": range,
    "chain": lambda place: range(max(0, place - 1), place),
    "star": lambda place: range(min(place, 1)),
}
"""Places of the agents whose answers the agent at a place reads: all before it, the one before it, only the first."""
STORE_BYTES = 4 << 30
COLUMNS = ("requests_per_s", "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "whole_p50_ms", "whole_p95_ms",
           "stall_p50_ms", "stall_p99_ms", "hold_p50_ms", "hold_p99_ms")  # fmt: skip
"""Figures of the printed table."""


@dataclass(frozen=True)
class Served:
    """One request: seconds to the first token and to the end, the longest pause between two tokens, and for how long
    its load and its share of the repair pass held up all others."""

    ttft: float
    whole: float
    stall: float
    hold: float


def summary(requests: Sequence[Served], seconds: float) -> dict[str, float]:
    """Throughput and percentiles of requests served in so many seconds; milliseconds but for ``requests_per_s``."""
    result = {"requests": float(len(requests)), "requests_per_s": len(requests) / seconds}
    for name in ("ttft", "whole", "stall", "hold"):
        times = [getattr(request, name) * 1e3 for request in requests]
        result |= {f"{name}_p{share}_ms": round(percentile(times, share), 1) for share in (50, 95, 99)}
    result["ttft_mean_ms"] = round(mean(request.ttft for request in requests) * 1e3, 1)
    return result


@dataclass(frozen=True)
class ServeBench:
    """Sessions of one team, with one of ``GRAPHS``."""

    agents: int
    sizes: Sizes
    seed: int
    graph: str
    audits: bool
    """Sessions to learn from are audited."""

    def session(self, engine: InProcessEngine, team: PaperTeam, number: int, mode: Mode) -> list[Served]:
        """One pass of a team over a question of its own."""
        question = team.question(number)
        answers: list[Ids] = []
        served = []
        for place, agent in enumerate(team.names):
            known = {team.names[other]: answers[other] for other in GRAPHS[self.graph](place)}
            prompt = team.write(agent, question, known)
            sampling = team.answering(agent, number)
            how: dict[str, Any] = {"session": f"{mode}-{number}"}
            if mode is Mode.OBSERVE and self.audits:
                how |= {"audit": (engine.config.reuse.policy,), "audit_tokens": 0}
            started = time.monotonic()
            answer = ask(engine, prompt, sampling, agent, shared=True, salt=mode.value, mode=mode, **how)
            stall = max((after - before for before, after in pairwise(answer.stamps)), default=0.0)
            hold = (answer.report.load_ms + answer.report.repair_ms) / 1e3
            served.append(Served(answer.stamps[0] - started, answer.stamps[-1] - started, stall, hold))
            answers.append(answer.tokens)
        return served

    def run(
        self, engine: InProcessEngine, numbers: Sequence[int], mode: Mode, concurrency: int, rate: float | None = None
    ) -> dict[str, float]:
        """Serve sessions and sum up; with a ``rate`` (per second) they arrive by chance, otherwise as soon as there
        is room. The time counts from the first arrival to the last end."""
        team = PaperTeam(engine.tokenizer, self.agents, self.sizes, self.seed)
        arrivals = random.Random(self.seed)
        started = time.monotonic()
        with ThreadPoolExecutor(concurrency) as pool:
            jobs = []
            for number in numbers:
                jobs.append(pool.submit(self.session, engine, team, number, mode))
                if rate is not None:
                    time.sleep(arrivals.expovariate(rate))
            requests = [request for job in jobs for request in job.result()]
        result = summary(requests, time.monotonic() - started)
        engine.drain(timeout=120)
        return result


def run_serve(args: argparse.Namespace) -> int:
    """Run ``kvcomm bench serve``; returns the exit status.

    Raises:
        ConfigurationError: no such graph, or too many agents.
    """
    if args.graph not in GRAPHS:
        raise ConfigurationError(f"graph {args.graph!r} does not exist; choose from {', '.join(GRAPHS)}")
    sizes = Sizes(args.prefix, args.input, args.output)
    reuse = ReuseConfig(idle_budget=0, store_bytes=STORE_BYTES, small_divergence=args.small_divergence)
    most, longest = max(args.concurrency), sizes.longest(args.agents) + 64
    config = EngineConfig(
        model=args.model, dtype=args.dtype, max_model_len=longest, max_num_seqs=most, seed=args.seed, reuse=reuse
    )
    results = []
    bench = ServeBench(args.agents, sizes, args.seed, args.graph, audits=args.small_divergence > 0)
    with progress() as step, compared(config, args.baseline, eager=args.plain_eager) as (engine, plain, how):
        step("learning")
        bench.run(engine, range(args.warmup), Mode.OBSERVE, min(args.warmup, most))
        dense = partial(bench.run, engine) if plain is None else partial(plain.call, bench.run)
        serve = {Mode.DENSE: dense, Mode.AUTO: partial(bench.run, engine)}
        dense(range(1), Mode.DENSE, 1)
        for place, concurrency in enumerate(args.concurrency):
            first = args.warmup + place * args.sessions
            line: dict[str, Any] = {"concurrency": concurrency}
            for mode in (Mode.DENSE, Mode.AUTO) if place % 2 else (Mode.AUTO, Mode.DENSE):
                step(f"{concurrency} sessions at once, {mode}")
                numbers = range(first, first + args.sessions)
                rest()
                line[mode.value] = serve[mode](numbers, mode, concurrency, args.rate)
            results.append(line)
    _show(results, args)
    save_json(args, {"load": results, **how})
    return 0


def _show(results: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    loop = "closed loop" if args.rate is None else f"{args.rate:g} sessions a second"
    title = f"{args.agents} agents ({args.graph}), {loop}, answers of {args.output} tokens"
    headings = [column.removesuffix("_ms") for column in ("sessions", "way", *COLUMNS)]
    rows = [
        (str(line["concurrency"]), way, *(f"{line[mode][c]:,.{2 if 'per_s' in c else 0}f}" for c in COLUMNS))
        for line in results
        for mode, way in ((Mode.DENSE, "dense"), (Mode.AUTO, "reuse"))
    ]
    show(title, headings, rows, width=140)
    for line in results:
        ratio = line["auto"]["requests_per_s"] / line["dense"]["requests_per_s"]
        print(f"{line['concurrency']} sessions at once: {ratio:.2f} times the requests of dense")
    print(
        "Milliseconds. stall: a request's longest pause between two tokens of its answer; hold: what load and repair "
        "of a request take, while all others wait."
    )
