"""How does the engine serve many teams at once? Sessions arrive and are timed, densely and with reuse, in one engine.

A session is a team in the order of its graph: each agent reads the question and the answers of the agents it hears.
Closed loop: so many sessions are always under way. Open loop: sessions arrive by chance (Poisson), however long those
before them take, at most ``concurrency`` at once.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvcomm_integrations.bench.paper_team import Ids, PaperTeam, Sizes, answering
from kvcomm_integrations.bench.scores import as_config
from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.engines.interface import GenerationRequest
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.wire import Mode

GRAPHS = ("full", "chain", "star")
"""``full``: everybody hears all before; ``chain``: the one before; ``star``: the first only."""
STORE_BYTES = 4 << 30


def heard(graph: str, place: int) -> range:
    """Places of the agents whose answers the agent at ``place`` reads.

    Raises:
        ConfigurationError: no such graph.
    """
    if graph == "full":
        return range(place)
    if graph == "chain":
        return range(max(0, place - 1), place)
    if graph == "star":
        return range(min(place, 1))
    raise ConfigurationError(f"graph {graph!r} does not exist; choose from {', '.join(GRAPHS)}")


@dataclass(frozen=True)
class Served:
    """One request: seconds to the first token and to the end, the longest pause between two tokens, and for how long
    its load and its share of the repair pass held up all others."""

    ttft: float
    whole: float
    stall: float
    hold: float = 0.0


@dataclass
class Load:
    """All requests of one way of serving."""

    seconds: float = 0.0
    """From the first arrival to the last end."""
    requests: list[Served] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Throughput and percentiles; milliseconds but for ``requests_per_s``."""
        result = {"requests": float(len(self.requests)), "requests_per_s": len(self.requests) / self.seconds}
        for name in ("ttft", "whole", "stall", "hold"):
            times = [getattr(request, name) * 1e3 for request in self.requests]
            result |= {f"{name}_p{share}_ms": round(percentile(times, share), 1) for share in (50, 95, 99)}
        result["ttft_mean_ms"] = round(mean(request.ttft for request in self.requests) * 1e3, 1)
        return result


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that at least ``share`` per cent of all do not exceed."""
    return sorted(values)[max(0, -(-share * len(values) // 100) - 1)]


class ServeBench:
    """Sessions of one team on one engine.

    Args:
        engine: the engine to load.
        team: whose prompts are sent.
        graph: one of ``GRAPHS``.
        audits: sessions to learn from are audited.
    """

    def __init__(self, engine: InProcessEngine, team: PaperTeam, graph: str, *, audits: bool = False) -> None:
        self.audits = audits
        self.engine = engine
        self.team = team
        self.graph = graph

    def session(self, number: int, mode: Mode) -> list[Served]:
        """One pass of a team over a question of its own."""
        question = self.team.question(number)
        answers: list[Ids] = []
        served = []
        for place, agent in enumerate(self.team.names):
            known = {self.team.names[other]: answers[other] for other in heard(self.graph, place)}
            request = self._request(agent, question, known, number, mode)
            started = time.monotonic()
            stamps: list[float] = []
            answer: list[int] = []
            hold = 0.0
            for delta in self.engine.generate_sync(request):
                stamps.append(time.monotonic())
                answer.extend(delta.token_ids)
                if delta.report is not None:
                    hold = (delta.report.load_ms + delta.report.repair_ms) / 1e3
            pauses = [after - before for before, after in pairwise(stamps)]
            served.append(Served(stamps[0] - started, stamps[-1] - started, max(pauses, default=0.0), hold))
            answers.append(tuple(answer))
        return served

    def run(self, numbers: Sequence[int], mode: Mode, concurrency: int, rate: float | None, seed: int) -> Load:
        """Serve sessions; with a ``rate`` (per second) they arrive by chance, otherwise as soon as there is room."""
        arrivals = random.Random(seed)
        load = Load()
        started = time.monotonic()
        with ThreadPoolExecutor(concurrency) as pool:
            jobs = []
            for number in numbers:
                jobs.append(pool.submit(self.session, number, mode))
                if rate is not None:
                    time.sleep(arrivals.expovariate(rate))
            for job in jobs:
                load.requests.extend(job.result())
        load.seconds = time.monotonic() - started
        return load

    def _request(
        self, agent: str, question: Ids, known: Mapping[str, Ids], number: int, mode: Mode
    ) -> GenerationRequest:
        prompt = self.team.write(agent, question, known)
        params = prompt.params(
            agent=agent, session=f"{mode}-{number}", response_name=f"agent:{agent}:response", mode=mode
        )
        if mode is Mode.OBSERVE and self.audits:
            params = params.model_copy(update={"audit": (self.engine.config.reuse.policy,), "audit_tokens": 0})
        sampling = answering(self.team.sizes.output, seed=1000 * number + self.team.names.index(agent))
        return GenerationRequest(prompt, params, sampling, cache_salt=mode.value)


def run_serve(args: argparse.Namespace) -> int:
    """Run ``kvcomm bench serve``; returns the exit status.

    Raises:
        ConfigurationError: no such graph, or too many agents.
    """
    heard(args.graph, 0)
    sizes = Sizes(args.prefix, args.input, args.output)
    reuse = ReuseConfig(audit_rate=0, learn_rate=0, store_bytes=STORE_BYTES, small_divergence=args.small_divergence)
    longest = sizes.prefix + sizes.input + args.agents * (sizes.output + 32) + 64
    engine = InProcessEngine(
        EngineConfig(
            model=args.model, max_model_len=longest, max_num_seqs=max(args.concurrency), seed=args.seed, reuse=reuse
        )
    )
    results = []
    try:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("starting vLLM", total=None)
            team = PaperTeam(engine.tokenizer, args.agents, sizes, args.seed)
            bench = ServeBench(engine, team, args.graph, audits=args.small_divergence > 0)
            progress.update(task, description="learning")
            bench.run(range(args.warmup), Mode.OBSERVE, min(args.warmup, max(args.concurrency)), None, args.seed)
            bench.run(range(1), Mode.DENSE, 1, None, args.seed)
            first = args.warmup
            for place, concurrency in enumerate(args.concurrency):
                numbers = range(first, first + args.sessions)
                first += args.sessions
                line: dict[str, Any] = {"concurrency": concurrency}
                ways = (Mode.DENSE, Mode.AUTO) if place % 2 else (Mode.AUTO, Mode.DENSE)
                for mode in ways:
                    progress.update(task, description=f"{concurrency} sessions at once, {mode}")
                    line[mode.value] = bench.run(numbers, mode, concurrency, args.rate, args.seed).summary()
                    engine.drain(timeout=120)
                results.append(line)
    finally:
        engine.close()
    _show(results, args)
    if args.json is not None:
        result = {"load": results, "config": as_config(args)}
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def _show(results: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    loop = "closed loop" if args.rate is None else f"{args.rate:g} sessions a second"
    table = Table(title=f"{args.agents} agents ({args.graph}), {loop}, answers of {args.output} tokens")
    columns = ("requests_per_s", "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "whole_p50_ms", "whole_p95_ms",
               "stall_p50_ms", "stall_p99_ms", "hold_p50_ms", "hold_p99_ms")  # fmt: skip
    for column in ("sessions", "way", *columns):
        table.add_column(column.removesuffix("_ms"), justify="right")
    for line in results:
        for mode in (Mode.DENSE, Mode.AUTO):
            figures = line[mode.value]
            cells = (
                f"{figures[column]:,.2f}" if "per_s" in column else f"{figures[column]:,.0f}" for column in columns
            )
            table.add_row(str(line["concurrency"]), "dense" if mode is Mode.DENSE else "reuse", *cells)
    console = Console(width=140)
    console.print(table)
    for line in results:
        ratio = line["auto"]["requests_per_s"] / line["dense"]["requests_per_s"]
        console.print(f"{line['concurrency']} sessions at once: {ratio:.2f} times the requests of dense")
    console.print(
        "Milliseconds. stall: a request's longest pause between two tokens of its answer; hold: what load and repair "
        "of a request take, while all others wait."
    )
