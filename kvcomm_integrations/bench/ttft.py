"""How long until an agent's first token? The paper's team, dense with prefix caching against reuse.

Dense is plain vLLM in a process of its own, with its own defaults, or dense requests in the engine that also reuses;
both engines are alive, and one at a time has work.

First the team answers every question once, densely: that gives the answers all later prompts hold, the references,
and (on the warm-up questions) the corrections. Then every agent's prompt is sent again for its first token only,
densely and with each policy in turn, in an order that alternates. In between the prefix cache is emptied, so that what
both ways find in it is what a team finds there: the agents' system prompts. The first agent, which has nobody to load
from, gets a session of its own each time. Interrupted, it shows the medians of what it has measured by then.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from kvcomm_integrations.bench import harness
from kvcomm_integrations.bench.plain import EngineProcess, compared, rest
from kvcomm_integrations.bench.prompting import Ids, PaperTeam, Sizes, greedy
from kvcomm_integrations.bench.scores import chosen_policies
from kvcomm_integrations.bench.synthetic import synthetic_model
from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.planning.gate import PROOF
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.wire import Mode

DENSE = "dense"
STORE_BYTES = 6 << 30
CACHE_BYTES = 3 << 30
"""Paged cache: all rounds of the paper's set-up are answered at once, bytes."""
COLUMNS = {
    "agent": "index", "prompt": "prompt_tokens", "exact": "exact", "loaded": "loaded", "repaired": "repaired",
    "computed": "computed", "dense ms": "ttft_dense_ms", "p95": "ttft_dense_p95_ms", "reuse ms": "ttft_reuse_ms",
    "p95 ": "ttft_reuse_p95_ms", "times": "speedup", "plan": "plan_ms", "load": "load_ms", "repair": "repair_ms",
    "rest": "forward_ms", "share": "load_share", "audit KL": "audited_kl",
}  # fmt: skip
"""Headings of the printed table and the figures below them."""
TOKENS = ("prompt_tokens", "exact", "loaded", "repaired", "computed")
PARTS = ("plan_ms", "load_ms", "repair_ms")
"""Figures of a request's report."""
Samples = dict[str, dict[int, list[harness.Answer]]]
"""First tokens by way and the agent's place."""


class TtftBench:
    """One engine, one team, and the ways of reuse to compare with dense.

    Args:
        audits: rounds to learn from are audited, as a share of an application's requests is.
        first: place of the first agent to be measured.
        plain: computes what is dense (``None``: ``engine`` does).
        tokens: of every answer that is timed; with more than one, decoding is timed too, and answers are harvested.
    """

    def __init__(
        self, engine: InProcessEngine, team: PaperTeam, policies: Sequence[str], *, audits: bool = False,
        first: int = 0, plain: EngineProcess | None = None, tokens: int = 1,
    ) -> None:  # fmt: skip
        self.engine, self.team, self.audits, self.plain, self.tokens = engine, team, audits, plain, tokens
        self.ways = (DENSE, *policies)
        self.measured = range(first, len(team.names))
        self.samples: Samples = {way: {place: [] for place in self.measured} for way in self.ways}
        self._audited: list[dict[str, Any]] = []
        """Audits of the rounds to learn from, in order."""
        self._answers: dict[int, list[Ids]] = {}
        self._questions: dict[int, Ids] = {}
        self._runs = 0

    def run(self, args: argparse.Namespace) -> Iterator[str]:
        """All rounds of a benchmark; yields what is being done."""
        taught, measured = range(args.warmup), range(args.warmup, args.warmup + args.rounds)
        yield from self._answer_all([*taught, *measured], taught)
        for number in taught[-args.warm_rounds :] if args.warm_rounds else ():
            yield from self._measure(number, counted=False)
        for number in measured:
            yield from self._measure(number, counted=True)

    def rounds(self) -> dict[str, dict[int, list[dict[str, Any]]]]:
        """Every timed answer, by way and the agent's index: its times and its report."""
        return {
            way: {
                place + 1: [
                    {
                        "ttft_ms": answer.ttft_ms,
                        "tokens_per_s": answer.tokens_per_s,
                        **answer.report.model_dump(mode="json", exclude={"segments"}),
                    }
                    for answer in answers
                ]
                for place, answers in agents.items()
            }
            for way, agents in self.samples.items()
        }

    def figures(self) -> dict[str, list[dict[str, Any]]] | None:
        """A line of figures for every agent by policy; ``None``: not all have been measured."""
        if not all(answers for agents in self.samples.values() for answers in agents.values()):
            return None
        return {way: [self._figures(place, way) for place in self.measured] for way in self.ways[1:]}

    def _figures(self, place: int, way: str) -> dict[str, Any]:
        """One agent's line; milliseconds and tokens are medians."""
        samples = {"dense": self.samples[DENSE][place], "reuse": self.samples[way][place]}
        times = {name: [answer.ttft_ms for answer in answers] for name, answers in samples.items()}
        dense, reuse = median(times["dense"]), median(times["reuse"])
        reports = [answer.report for answer in samples["reuse"]]
        middle = {name: float(median(getattr(report, name) for report in reports)) for name in (*TOKENS, *PARTS)}
        spent, loaded = sum(middle[name] for name in PARTS), middle["loaded"]
        # Loads in units of the dense prefill they replace: dense time of as many tokens as were loaded.
        replaced = dense * loaded / (loaded + middle["repaired"] + middle["computed"]) if loaded else 0.0
        return {
            "index": place + 1,
            **{f"ttft_{name}_ms": round(median(found), 1) for name, found in times.items()},
            **{f"ttft_{name}_p95_ms": round(harness.percentile(found, 95), 1) for name, found in times.items()},
            "speedup": round(dense / reuse, 2),
            **{name: round(value, 2) for name, value in middle.items()},
            "load_share": round(middle["load_ms"] / replaced, 4) if replaced else 0.0,
            "forward_ms": round(reuse - spent, 1),
            "n": len(times["reuse"]),
            **{f"decode_{n}_per_s": round(median(a.tokens_per_s for a in found), 2) for n, found in samples.items()},
            "audited_kl": self._divergence(self.team.names[place], way),
        }

    def _divergence(self, agent: str, policy: str) -> float | None:
        """Mean KL of an agent's first token in its latest audits, nats; ``None`` if it had none."""
        audits = [
            audit["kl"][0]
            for audit in self._audited
            if audit["policy"] == policy and agent in {Edge(*edge).target for edge in audit["edges"]}
        ]
        return mean(audits[-PROOF:]) if audits else None

    def _answer_all(self, rounds: Sequence[int], taught: Sequence[int]) -> Iterator[str]:
        """Let the team answer all rounds; only those in ``taught`` teach."""
        for number in rounds:
            self._questions[number], self._answers[number] = self.team.question(number), []
        *others, last = self.team.names
        for agent in others:
            yield f"{agent} answers {len(rounds)} questions"
            with ThreadPoolExecutor(len(rounds)) as pool:
                answers = list(pool.map(lambda n, agent=agent: self._answer(agent, n, teach=n in taught), rounds))
            for number, answer in zip(rounds, answers, strict=True):
                self._answers[number].append(answer)
        for number in taught:
            yield f"{last} learns"
            self._answer(last, number, teach=True, tokens=1)
        self.engine.drain(timeout=300)
        for audits in self.engine.call_workers("kvcomm_take_audits"):
            self._audited += audits
        self.engine.reset_prefix_cache()

    def _measure(self, number: int, counted: bool) -> Iterator[str]:
        """Time every agent's first token on one round."""
        for place in self.measured:
            agent = self.team.names[place]
            for way in self.ways if (number + place) % 2 else self.ways[::-1]:
                yield f"round {number}: {agent}, {way}"
                answer = self._first_token(agent, place, number, way)
                if counted:
                    self.samples[way][place].append(answer)

    def _prompt(self, agent: str, number: int, place: int | None = None) -> SegmentedPrompt:
        answers = self._answers[number][:place]
        return self.team.write(agent, self._questions[number], dict(zip(self.team.names, answers, strict=False)))

    def _answer(self, agent: str, number: int, teach: bool, tokens: int | None = None) -> Ids:
        audited = self.ways[1:]
        if not self.audits:  # policies beside the engine's own learn from their audits
            audited = tuple(name for name in audited if name != self.engine.config.reuse.policy)
        how: dict[str, Any] = {"mode": Mode.OBSERVE, "teach": teach, "audit_tokens": 0}
        how |= {"session": f"round-{number}", "audit": audited if teach else ()}
        prompt, sampling = self._prompt(agent, number), self.team.answering(agent, number, tokens)
        return harness.ask(self.engine, prompt, sampling, agent, shared=True, **how).tokens

    def _first_token(self, agent: str, place: int, number: int, way: str) -> harness.Answer:
        self._runs += 1
        prefix = self.team.write(agent, self._questions[next(iter(self._questions))][:1], {})
        session = f"round-{number}" if place else f"first-{self._runs}"
        how: dict[str, Any] = {"session": session, "shared": self.tokens > 1}
        how |= {"mode": Mode.DENSE} if way == DENSE else {"policy": way}
        work = (prefix, self._prompt(agent, number, place), self.tokens, agent, how)
        if self.plain is None:
            return timed_answer(self.engine, *work)
        rest()
        return self.plain.call(timed_answer, *work) if way == DENSE else timed_answer(self.engine, *work)


def timed_answer(
    engine: InProcessEngine, prefix: SegmentedPrompt, prompt: SegmentedPrompt, tokens: int, agent: str,
    how: dict[str, Any],
) -> harness.Answer:  # fmt: skip
    """Answer a prompt on an engine that has nothing else to do and only ``prefix`` in its prefix cache.

    Args:
        how: parameters of the request.
    """
    engine.reset_prefix_cache()
    harness.ask(engine, prefix, greedy(1), agent, session="prefix", mode=Mode.DENSE)
    engine.drain()
    answer = harness.ask(engine, prompt, greedy(tokens), agent, **how)
    engine.drain()
    return answer


def run_ttft(args: argparse.Namespace) -> int:
    """Run ``kvcomm bench ttft``; returns the exit status.

    Raises:
        ConfigurationError: an unknown policy, too many agents, none to measure, or lengths that cannot be made.
    """
    policies = chosen_policies(args)
    if args.from_agent > args.agents:
        raise ConfigurationError(f"--from-agent {args.from_agent} is beyond the {args.agents} agents")
    sizes = [Sizes(*lengths) for lengths in product(args.prefix, args.input, args.output)]
    longest = max(size.longest(args.agents) for size in sizes) + 256
    model = nullcontext(args.model) if args.synthetic is None else synthetic_model(args.synthetic, args.model)
    settings: list[dict[str, Any]] = []
    with (
        model as args.model,
        harness.progress() as step,
        compared(_config(args, policies, longest), args.baseline, eager=args.plain_eager) as (engine, plain, how),
    ):
        for number, size in enumerate(sizes):
            team = PaperTeam(engine.tokenizer, args.agents, size, args.seed + number)
            audits, first = args.small_divergence > 0, args.from_agent - 1
            bench = TtftBench(engine, team, policies, audits=audits, first=first, plain=plain)
            interrupted = False
            try:
                for text in bench.run(args):
                    step(f"{size}: {text}")
            except KeyboardInterrupt:
                interrupted = True
            if (figures := bench.figures()) is not None:
                settings.append({"sizes": asdict(size), "policies": figures, "rounds": bench.rounds()})
            if interrupted:
                break
            engine.reset_prefix_cache(references=True)
    if not settings:
        raise KeyboardInterrupt
    show_settings(settings)
    agents = settings[0]["policies"][policies[0]]
    harness.save_json(args, {"agents": agents, "settings": settings, **how})
    if args.plot is not None:
        _plot(settings, args.plot)
    return 0


def _config(args: argparse.Namespace, policies: Sequence[str], longest: int) -> EngineConfig:
    reuse = ReuseConfig(
        idle_budget=0,
        store_bytes=STORE_BYTES,
        variants=tuple(name for name in policies if ":" in name),
        small_divergence=args.small_divergence,
        **({} if args.repair_depth is None else {"repair_depth": args.repair_depth}),
    )
    return EngineConfig(
        model=args.model,
        dtype=args.dtype,
        max_model_len=longest,
        kv_cache_bytes=CACHE_BYTES,
        seed=args.seed,
        reuse=reuse,
    )


def show_settings(settings: Sequence[dict[str, Any]]) -> None:
    """Print a table for every setting and policy."""
    for setting in settings:
        size = "prefix {prefix}, question {input}, answers {output} tokens".format_map(setting["sizes"])
        for name, agents in setting["policies"].items():
            title = f"Time to first token: {size}; {name} against dense with prefix caching"
            rows = ([_cell(agent[figure]) for figure in COLUMNS.values()] for agent in agents)
            harness.show(title, list(COLUMNS), rows, width=160)
    print(
        "Medians. load holds correction, rotation and write, share is in units of the dense prefill it replaces; "
        "rest is vLLM's own forward with all that surrounds it. audit KL: nats, mean of the first token's in the last "
        f"{PROOF} rounds to learn from."
    )


def _cell(figure: float | None) -> str:
    return "" if figure is None else f"{figure:,.0f}" if figure >= 1000 else f"{figure:.4g}"


def _plot(settings: Sequence[dict[str, Any]], path: Path) -> None:
    """Times to first token by agent on the left, their ratio on the right, a line per setting and policy."""
    with harness.plot(path, width=12, columns=2) as (times, ratios):
        for setting in settings:
            for name, agents in setting["policies"].items():
                label = f"{Sizes(**setting['sizes'])} {name}"
                index = [agent["index"] for agent in agents]
                [line] = times.plot(index, [agent["ttft_reuse_ms"] for agent in agents], label=label)
                dense = [agent["ttft_dense_ms"] for agent in agents]
                times.plot(index, dense, linestyle="dashed", color=line.get_color())
                ratios.plot(index, [agent["speedup"] for agent in agents], label=label)
        times.set_ylabel("time to first token, ms (dashed: dense with prefix caching)")
        ratios.set_ylabel("dense over reuse")
        for axes in (times, ratios):
            axes.set_xlabel("agent")
            axes.legend()
