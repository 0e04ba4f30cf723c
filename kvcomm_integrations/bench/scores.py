"""What the fidelity benchmarks share: contents to ask about, scores, tables and the plot. Knows no engine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcomm_integrations.bench.problems import generate_documents, generate_problems, load_questions
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.reuse.policies import create_policy

DEFAULT_POLICIES = ("ridge", "kvcomm", "kvcmas", "aligned", "full_share", "cacheblend")


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


def chosen_policies(args: argparse.Namespace) -> tuple[str, ...]:
    """The policies a command line asks for.

    Raises:
        ConfigurationError: an unknown policy or option.
    """
    policies = tuple(args.policies.split(",")) if args.policies else DEFAULT_POLICIES
    for name in policies:
        create_policy(name)
    return policies


def chosen_contents(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Contents to learn from and to measure on.

    Raises:
        ConfigurationError: too few questions in the file.
    """
    kind = args.measure_contents or args.contents
    return (
        _contents(args.contents, args.questions, args.warmup, args.seed),
        _contents(kind, args.questions, args.measure, args.seed + 1, args.warmup),
    )


def as_config(args: argparse.Namespace) -> dict[str, Any]:
    """The command line as it is written to JSON."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in ("command", "small")}


def save(result: dict[str, Any], args: argparse.Namespace) -> None:
    """Write the JSON file and the plot, if asked for."""
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        _plot(result, args.plot)


def _contents(kind: str, file: Path | None, count: int, seed: int, skip: int = 0) -> list[str]:
    if kind == "documents":
        return generate_documents(count, seed, min_tokens=600, max_tokens=1000)
    if file is None:
        return [problem.question for problem in generate_problems(count, seed)]
    questions = load_questions(file)
    if len(questions) < skip + count:
        raise ConfigurationError(f"{file} has {len(questions)} questions; {skip + count} are needed")
    return questions[skip : skip + count]


def show_scores(result: dict[str, Any], columns: Sequence[str], console: Console) -> None:
    """Print one row per policy."""
    table = Table(title="Distance from dense (KL in nats, full vocabulary)")
    for column in ("policy", *columns):
        table.add_column(column.replace("_", " "), justify="left" if column == "policy" else "right")
    for name, score in result["policies"].items():
        table.add_row(name, *(_number(score.get(column)) for column in columns))
    console.print(table)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 or (value == int(value) and value >= 2) else f"{value:.4f}"


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
