"""How long until an agent's first token? The paper's team on the real engine, dense with prefix caching against reuse.

First the team answers every question once, densely: that gives the answers all later prompts hold, the references,
and (on the warm-up questions) the corrections. Then every agent's prompt is sent again for its first token only,
densely and with each policy in turn, in an order that alternates. In between the prefix cache is emptied, so that what
both ways find in it is what a team finds there: the agents' system prompts. The first agent, which has nobody to load
from, gets a session of its own each time. Interrupted, it shows the medians of what it has measured by then.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import product
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvcomm_integrations.bench.paper_team import Ids, PaperTeam, Sizes, answering
from kvcomm_integrations.bench.scores import as_config, chosen_policies
from kvcomm_integrations.bench.synthetic import synthetic_model
from kvcomm_integrations.bench.ttft_plot import plot_ttft
from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.engines.interface import Delta, GenerationRequest, SamplingOptions
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.planning.gate import PROOF
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.wire import KVCommParams, Mode, RequestReport

DENSE = "dense"
STORE_BYTES = 6 << 30
CACHE_BYTES = 3 << 30
"""Paged cache: all rounds of the paper's set-up are answered at once, bytes."""


@dataclass
class Samples:
    """All measured first tokens of one agent in one way."""

    ttft_ms: list[float] = field(default_factory=list)
    reports: list[RequestReport] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Take in the last delta of a request."""
        self.ttft_ms.append(delta.ttft_ms or 0.0)
        if delta.report is not None:
            self.reports.append(delta.report)

    @property
    def median(self) -> float:
        """Median time to the first token, milliseconds."""
        return median(self.ttft_ms)

    @property
    def p95(self) -> float:
        """The time that one in twenty exceeds; the longest of fewer than twenty."""
        return sorted(self.ttft_ms)[max(0, -(-95 * len(self.ttft_ms) // 100) - 1)]

    def middle(self, name: str) -> float:
        """Median of a figure of the reports: tokens or milliseconds."""
        return float(median(getattr(report, name) for report in self.reports)) if self.reports else 0.0


class TtftBench:
    """One engine and one team.

    Args:
        engine: the engine to measure.
        team: whose prompts are sent.
        policies: ways of reuse to compare with dense.
        audits: rounds to learn from are audited, as a share of an application's requests is.
        first: place of the first agent to be measured.
    """

    def __init__(
        self,
        engine: InProcessEngine,
        team: PaperTeam,
        policies: Sequence[str],
        *,
        audits: bool = True,
        first: int = 0,
    ) -> None:
        self.audits = audits
        self.measured = range(first, len(team.names))
        self.engine = engine
        self.team = team
        self.ways = (DENSE, *policies)
        self.audited: list[dict[str, Any]] = []
        """Audits of the rounds to learn from, in order."""
        self._answers: dict[int, list[Ids]] = {}
        self._questions: dict[int, Ids] = {}
        self._runs = 0

    def answer_all(self, taught: Sequence[int], measured: Sequence[int]) -> Iterator[str]:
        """Let the team answer all rounds, those to be measured without teaching; yields what is being done."""
        rounds = [*taught, *measured]
        for number in rounds:
            self._questions[number], self._answers[number] = self.team.question(number), []
        for agent in self.team.names[:-1]:
            yield f"{agent} answers {len(rounds)} questions"
            with ThreadPoolExecutor(len(rounds)) as pool:
                jobs = [pool.submit(self._answer, agent, number, number in taught) for number in rounds]
                answers = [job.result() for job in jobs]
            for number, answer in zip(rounds, answers, strict=True):
                self._answers[number].append(answer)
        last = self.team.names[-1]
        for number in taught:
            yield f"{last} learns"
            self._answer(last, number, teach=True, tokens=1)
        self.engine.drain(timeout=300)
        for audits in self.engine.call_workers("kvcomm_take_audits"):
            self.audited += audits
        self.engine.reset_prefix_cache()

    def divergence(self, agent: str, policy: str) -> float | None:
        """Mean KL of an agent's first token in its latest audits, nats; ``None`` if it had none."""
        audits = [a["kl"][0] for a in self.audited if a["policy"] == policy and agent in _targets(a)]
        return mean(audits[-PROOF:]) if audits else None

    def measure(self, number: int, samples: dict[str, list[Samples]] | None) -> Iterator[str]:
        """Time every agent's first token on one round; yields what is being done."""
        for place in self.measured:
            agent = self.team.names[place]
            ways = self.ways if (number + place) % 2 else self.ways[::-1]
            for way in ways:
                yield f"round {number}: {agent}, {way}"
                delta = self._first_token(agent, place, number, way)
                if samples is not None:
                    samples[way][place - self.measured.start].add(delta)

    def _prompt(self, agent: str, number: int, place: int | None = None) -> SegmentedPrompt:
        answers = self._answers[number][:place]
        return self.team.write(agent, self._questions[number], dict(zip(self.team.names, answers, strict=False)))

    def _answer(self, agent: str, number: int, teach: bool, tokens: int | None = None) -> Ids:
        prompt = self._prompt(agent, number)
        params = prompt.params(
            agent=agent, session=f"round-{number}", response_name=f"agent:{agent}:response", mode=Mode.OBSERVE
        )
        audited = self.ways[1:]
        if not self.audits:  # policies beside the engine's own learn from their audits
            audited = tuple(name for name in audited if name != self.engine.config.reuse.policy)
        params = params.model_copy(update={"teach": teach, "audit": audited if teach else (), "audit_tokens": 0})
        count = tokens or self.team.sizes.output
        sampling = answering(count, seed=1000 * number + self.team.names.index(agent))
        deltas = list(self.engine.generate_sync(GenerationRequest(prompt, params, sampling)))
        return tuple(token for delta in deltas for token in delta.token_ids)

    def _first_token(self, agent: str, place: int, number: int, way: str) -> Delta:
        self._runs += 1
        prompt = self._prompt(agent, number, place)
        session = f"round-{number}" if place else f"first-{self._runs}"
        params = prompt.params(agent=agent, session=session, mode=Mode.DENSE if way == DENSE else Mode.AUTO)
        if way != DENSE:
            params = params.model_copy(update={"policy": way})
        self._keep_prefix(agent)
        last = self._send(prompt, params)
        self.engine.drain()
        return last

    def _keep_prefix(self, agent: str) -> None:
        """Empty the prefix cache of everything but the agent's system prompt."""
        self.engine.reset_prefix_cache()
        prompt = self.team.write(agent, self._questions[next(iter(self._questions))][:1], {})
        self._send(prompt, prompt.params(agent=agent, session="prefix", mode=Mode.DENSE))
        self.engine.drain()

    def _send(self, prompt: SegmentedPrompt, params: KVCommParams) -> Delta:
        request = GenerationRequest(prompt, params, SamplingOptions(max_tokens=1, temperature=0))
        return list(self.engine.generate_sync(request))[-1]


def run_ttft(args: argparse.Namespace) -> int:
    """Run ``kvcomm bench ttft``; returns the exit status.

    Raises:
        ConfigurationError: an unknown policy, too many agents, none to measure, or lengths that cannot be made.
    """
    if args.synthetic is None:
        return _run(args)
    with synthetic_model(args.synthetic, args.model) as args.model:
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    policies = chosen_policies(args)
    if args.from_agent > args.agents:
        raise ConfigurationError(f"--from-agent {args.from_agent} is beyond the {args.agents} agents")
    sizes = [Sizes(*lengths) for lengths in product(args.prefix, args.input, args.output)]
    longest = max(size.prefix + size.input + args.agents * (size.output + 32) for size in sizes)
    reuse = ReuseConfig(
        audit_rate=0,
        learn_rate=0,
        store_bytes=STORE_BYTES,
        variants=_variants(policies),
        small_divergence=args.small_divergence,
    )
    if args.repair_depth is not None:
        reuse = reuse.model_copy(update={"repair_depth": args.repair_depth})
    config = EngineConfig(
        model=args.model, max_model_len=longest + 256, kv_cache_bytes=CACHE_BYTES, seed=args.seed, reuse=reuse
    )
    engine = InProcessEngine(config)
    settings: list[dict[str, Any]] = []
    interrupted = False
    try:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("starting vLLM", total=None)
            for number, size in enumerate(sizes):
                team = PaperTeam(engine.tokenizer, args.agents, size, args.seed + number)
                bench = TtftBench(engine, team, policies, audits=args.small_divergence > 0, first=args.from_agent - 1)
                samples = {way: [Samples() for _ in bench.measured] for way in bench.ways}
                try:
                    for step in _steps(bench, samples, args):
                        progress.update(task, description=f"{size.prefix}/{size.input}/{size.output}: {step}")
                except KeyboardInterrupt:
                    interrupted = True
                if all(sample.ttft_ms for agents in samples.values() for sample in agents):
                    settings.append({"sizes": asdict(size), "policies": _figures(samples, bench)})
                if interrupted:
                    break
                engine.reset_prefix_cache(references=True)
    finally:
        engine.close()
    if not settings:
        raise KeyboardInterrupt
    _show(settings)
    first = settings[0]["policies"][policies[0]]
    result = {"agents": first, "settings": settings, "config": as_config(args)}
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        plot_ttft(settings, args.plot)
    return 0


def _targets(audit: dict[str, Any]) -> set[str]:
    return {Edge(*edge).target for edge in audit["edges"]}


def _variants(policies: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in policies if ":" in name)


def _steps(bench: TtftBench, samples: dict[str, list[Samples]], args: argparse.Namespace) -> Iterator[str]:
    taught = range(args.warmup)
    measured = range(args.warmup, args.warmup + args.rounds)
    yield from bench.answer_all(taught, measured)
    for number in taught[-args.warm_rounds :] if args.warm_rounds else ():
        yield from bench.measure(number, None)
    for number in measured:
        yield from bench.measure(number, samples)


def _figures(samples: dict[str, list[Samples]], bench: TtftBench) -> dict[str, list[dict[str, Any]]]:
    first = bench.measured.start + 1
    return {
        name: [
            _agent(index, dense, reuse) | {"audited_kl": bench.divergence(bench.team.names[index - 1], name)}
            for index, (dense, reuse) in enumerate(zip(samples[DENSE], samples[name], strict=True), first)
        ]
        for name in bench.ways[1:]
    }


def _agent(index: int, dense: Samples, reuse: Samples) -> dict[str, Any]:
    """One line of the table; milliseconds and tokens are medians."""
    parts = {name: reuse.middle(name) for name in ("plan_ms", "load_ms", "repair_ms")}
    return {
        "index": index,
        "ttft_dense_ms": round(dense.median, 1),
        "ttft_dense_p95_ms": round(dense.p95, 1),
        "ttft_reuse_ms": round(reuse.median, 1),
        "ttft_reuse_p95_ms": round(reuse.p95, 1),
        "speedup": round(dense.median / reuse.median, 2),
        **{name: reuse.middle(name) for name in ("prompt_tokens", "exact", "loaded", "repaired", "computed")},
        **{name: round(value, 2) for name, value in parts.items()},
        "load_share": round(_load_share(dense, reuse), 4),
        "forward_ms": round(reuse.median - sum(parts.values()), 1),
        "n": len(reuse.ttft_ms),
    }


def _load_share(dense: Samples, reuse: Samples) -> float:
    """Loads in units of the dense prefill they replace: dense time of as many tokens as were loaded."""
    loaded, repaired, computed = (reuse.middle(name) for name in ("loaded", "repaired", "computed"))
    if not loaded:
        return 0.0
    return reuse.middle("load_ms") / (dense.median * loaded / (loaded + repaired + computed))


def _cell(figure: float | None) -> str:
    if figure is None:
        return ""
    return f"{figure:,.0f}" if figure >= 1000 else f"{figure:.4g}"


def _show(settings: Sequence[dict[str, Any]]) -> None:
    console = Console(width=160)
    columns = {
        "agent": "index", "prompt": "prompt_tokens", "exact": "exact", "loaded": "loaded", "repaired": "repaired",
        "computed": "computed", "dense ms": "ttft_dense_ms", "p95": "ttft_dense_p95_ms", "reuse ms": "ttft_reuse_ms",
        "p95 ": "ttft_reuse_p95_ms", "times": "speedup", "plan": "plan_ms", "load": "load_ms", "repair": "repair_ms",
        "rest": "forward_ms", "share": "load_share", "audit KL": "audited_kl",
    }  # fmt: skip
    for setting in settings:
        size = setting["sizes"]
        for name, agents in setting["policies"].items():
            table = Table(
                title=f"Time to first token: prefix {size['prefix']}, question {size['input']}, "
                f"answers {size['output']} tokens; {name} against dense with prefix caching"
            )
            for column in columns:
                table.add_column(column, justify="right")
            for agent in agents:
                table.add_row(*(_cell(agent[key]) for key in columns.values()))
            console.print(table)
    console.print(
        "Medians. load holds correction, rotation and write, share is in units of the dense prefill it replaces; "
        "rest is vLLM's own forward with all that surrounds it. audit KL: nats, mean of the first token's in the last "
        f"{PROOF} rounds to learn from."
    )
