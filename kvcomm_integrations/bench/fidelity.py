"""How far is reuse from dense? Runs fully connected agents on the real engine and audits every policy on every call.

Each agent answers densely, so that all policies see the same prompts and the same answers (teacher forcing). When a
request is over, the engine computes what each policy would have produced at the answer's first positions, over the full
vocabulary (see ``connector/audit.py``), and then lets the policies learn from it. Time to the first token is measured
afterwards, with real reusing requests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvcomm_integrations.bench.problems import generate_documents, generate_problems, load_questions
from kvcomm_integrations.bench.prompting import AGENTS, Asker, Turn
from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.reuse.policies import POLICY_NAMES, policy_traits
from kvcomm_integrations.wire import Mode

DEFAULT_POLICIES = ("ridge", "kvcomm", "kvcmas", "aligned", "full_share", "cacheblend")
CURVE = ((0, 1), (1, 2), (2, 3), (3, 5), (5, 9), (9, 17))
"""Ranges of examples per edge for the learning curve."""


@dataclass
class Score:
    """Audits of one policy."""

    kl_first: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agreement: list[bool] = field(default_factory=list)
    prefix: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    repaired: list[float] = field(default_factory=list)

    def add(self, audit: dict[str, Any]) -> None:
        """Take in one audit as the worker reports it."""
        same = audit["agreement"]
        self.kl_first.append(audit["kl"][0])
        self.kl += audit["kl"]
        self.agreement += same
        self.prefix.append(next((i for i, s in enumerate(same) if not s), len(same)) / len(same))
        self.loaded.append(audit["loaded"] / audit["prompt_tokens"])
        self.repaired.append(audit["repaired"] / audit["prompt_tokens"])

    def summary(self) -> dict[str, float]:
        """Means over the audits; divergences in nats."""
        if not self.kl_first:
            return {"n": 0}
        return {
            "kl_first": mean(self.kl_first),
            "kl_mean": mean(self.kl),
            "agreement": mean(self.agreement),
            "prefix_match": mean(self.prefix),
            "reuse_rate_tokens": mean(self.loaded),
            "repaired_share": mean(self.repaired),
            "n": len(self.kl_first),
        }


def run_fidelity(args: argparse.Namespace) -> int:
    """Run the benchmark as the command line asks for it and print its tables; returns the exit status.

    Raises:
        ConfigurationError: an unknown policy, or too few questions.
    """
    policies = tuple(args.policies.split(",")) if args.policies else DEFAULT_POLICIES
    for name in policies:
        if name not in POLICY_NAMES:
            raise ConfigurationError(f"policy {name!r} does not exist; choose from {', '.join(POLICY_NAMES)}")
    taught = _contents(args.contents, args.questions, args.warmup, args.seed)
    measured = _contents(
        args.measure_contents or args.contents, args.questions, args.measure, args.seed + 1, args.warmup
    )
    reuse = ReuseConfig(audit_rate=0, learn_rate=0, max_repair_share=1.0)
    engine = InProcessEngine(EngineConfig(model=args.model, max_model_len=8192, seed=args.seed, reuse=reuse))
    try:
        result = _measure(Asker(engine, args.max_tokens), policies, taught, measured, args)
    finally:
        engine.close()
    _show(result)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        _plot(result, args.plot)
    return 0


def _measure(
    asker: Asker, policies: Sequence[str], taught: Sequence[str], measured: Sequence[str], args: argparse.Namespace
) -> dict[str, Any]:
    scores = {name: Score() for name in policies}
    curve = {name: [Score() for _ in CURVE] for name in policies}
    calls = 0
    agents = AGENTS[: args.agents]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("teaching", total=(len(taught) + len(measured)) * len(agents))
        for number, content in enumerate([*taught, *measured]):
            teach = number < len(taught)
            turns: list[Turn] = []
            for agent in agents:
                turn = asker.ask(agent, content, turns, session=f"fidelity-{number}", policies=policies,
                                 teach=teach, tokens=args.tokens)  # fmt: skip
                turns.append(turn)
                progress.update(task, advance=1, description="teaching" if teach else "measuring")
            calls += 0 if teach else len(agents) - 1
            for audit in filter(_loads_shared, asker.audits()):
                if not teach:
                    scores[audit["policy"]].add(audit)
                for place, (low, high) in enumerate(CURVE):
                    if teach and low <= number < high:
                        curve[audit["policy"]][place].add(audit)
        result = {name: score.summary() for name, score in scores.items()}
        stats = asker.engine.call_workers("kvcomm_stats")[0]
        for name in policies:
            result[name]["reuse_rate_calls"] = result[name]["n"] / calls if calls else 0.0
            result[name]["state_bytes"] = stats["policies"].get(name, 0)
            progress.update(task, description=f"timing {name}")
            result[name]["ttft_ratio"] = _ttft_ratio(asker, name, measured, agents, len(taught), args.timed)
    return {
        "policies": result,
        "curve": {
            name: [{"examples": low, **part.summary()} for (low, _), part in zip(CURVE, parts, strict=True)]
            for name, parts in curve.items()
        },
        "config": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "command"},
    }


def _loads_shared(audit: dict[str, Any]) -> bool:
    """Something that agents share was loaded, not only an agent's own template text."""
    return any(not name.startswith("fixed:") for _, _, name, _ in audit["edges"])


def _ttft_ratio(
    asker: Asker, policy: str, measured: Sequence[str], agents: Sequence[str], first: int, count: int
) -> float:
    """Median time to first token of the last agent, dense over reuse, the prefix cache emptied before each."""
    traits = policy_traits(policy)
    if traits is None or traits.needs_truth or not count:
        return 0.0
    times: dict[Mode, list[float]] = {Mode.DENSE: [], Mode.AUTO: []}
    for number, content in enumerate(measured[:count]):
        turns = asker.remembered(f"fidelity-{first + number}")[: len(agents) - 1]
        for mode, found in times.items():
            asker.engine.reset_prefix_cache()
            found.append(
                asker.time(agents[-1], content, turns, session=f"fidelity-{first + number}", mode=mode, policy=policy)
            )
    return median(times[Mode.DENSE]) / median(times[Mode.AUTO])


def _contents(kind: str, file: Path | None, count: int, seed: int, skip: int = 0) -> list[str]:
    if kind == "documents":
        return generate_documents(count, seed, min_tokens=600, max_tokens=1000)
    if file is None:
        return [problem.question for problem in generate_problems(count, seed)]
    questions = load_questions(file)
    if len(questions) < skip + count:
        raise ConfigurationError(f"{file} has {len(questions)} questions; {skip + count} are needed")
    return questions[skip : skip + count]


def _show(result: dict[str, Any]) -> None:
    console = Console(width=150)
    table = Table(title="Distance from dense (KL in nats, full vocabulary)")
    columns = ("kl_first", "kl_mean", "agreement", "prefix_match", "reuse_rate_calls", "reuse_rate_tokens",
               "repaired_share", "state_bytes", "ttft_ratio", "n")  # fmt: skip
    for column in ("policy", *columns):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name, score in result["policies"].items():
        table.add_row(name, *(_number(score.get(column)) for column in columns))
    console.print(table)
    learning = Table(title="While learning: mean KL / agreement by examples per edge")
    learning.add_column("policy")
    for low, high in CURVE:
        learning.add_column(str(low) if high == low + 1 else f"{low}-{high - 1}", justify="right")
    for name, parts in result["curve"].items():
        cells = [f"{p['kl_mean']:.4f} / {p['agreement']:.3f}" if p["n"] else "-" for p in parts]
        learning.add_row(name, *cells)
    console.print(learning)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == int(value) and value >= 2 else f"{value:.4f}"


def _plot(result: dict[str, Any], path: Path) -> None:
    """Mean KL against repaired share, one point per policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    for name, score in result["policies"].items():
        if score["n"]:
            axes.scatter(score["repaired_share"], score["kl_mean"])
            axes.annotate(name, (score["repaired_share"], score["kl_mean"]))
    axes.set_xlabel("share of prompt tokens repaired")
    axes.set_ylabel("mean KL to dense over the answer's first tokens, nats")
    axes.set_yscale("log")
    figure.savefig(path, dpi=120)
