"""What both fidelity benchmarks share: contents to ask about, the order of questions, scores, their table and plot."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

from kvcomm_integrations.bench.harness import Step, plot, save_json, show
from kvcomm_integrations.bench.problems import generate_documents, generate_problems, load_questions
from kvcomm_integrations.bench.prompting import Turn
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.reuse.policies import create_policy

DEFAULT_POLICIES = ("ridge", "kvcomm", "kvcmas", "aligned", "full_share", "cacheblend")

Ask = Callable[..., Turn]
"""``ask(agent, content, turns, number=..., teach=...)``: the agent's turn after those before it about a content, which
has a number, and is to be learned from or measured on."""


@dataclass
class Score:
    """Audits of one policy, as the worker reports them."""

    audits: list[dict[str, Any]] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Means over the audits; divergences in nats."""
        if not self.audits:
            return {"n": 0}
        same = [audit["agreement"] for audit in self.audits]
        return {
            "kl_first": mean(audit["kl"][0] for audit in self.audits),
            "kl_mean": mean(kl for audit in self.audits for kl in audit["kl"]),
            "agreement": mean(chain.from_iterable(same)),
            "prefix_match": mean([*tokens, False].index(False) / len(tokens) for tokens in same),
            "reuse_rate_tokens": mean(audit["loaded"] / audit["prompt_tokens"] for audit in self.audits),
            "repaired_share": mean(audit["repaired"] / audit["prompt_tokens"] for audit in self.audits),
            "n": len(self.audits),
        }

    def result(self, calls: int, state_bytes: int, edges: int) -> dict[str, float]:
        """The summary with the share of ``calls`` that loaded something, and the size of what was learned."""
        summary = self.summary()
        return summary | {
            "reuse_rate_calls": summary["n"] / calls if calls else 0.0,
            "state_bytes": state_bytes,
            "state_bytes_per_edge": state_bytes / edges if edges else 0.0,
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
    taught = _contents(args.contents, args.questions, args.warmup, args.seed)
    kind = args.measure_contents or args.contents
    return taught, _contents(kind, args.questions, args.measure, args.seed + 1, args.warmup)


def _contents(kind: str, file: Path | None, count: int, seed: int, skip: int = 0) -> list[str]:
    if kind == "documents":
        return generate_documents(count, seed, min_tokens=600, max_tokens=1000)
    if file is None:
        return [problem.question for problem in generate_problems(count, seed)]
    questions = load_questions(file)
    if len(questions) < skip + count:
        raise ConfigurationError(f"{file} has {len(questions)} questions; {skip + count} are needed")
    return questions[skip : skip + count]


def rounds(
    step: Step, taught: Sequence[str], measured: Sequence[str], agents: Sequence[str], ask: Ask
) -> Iterator[tuple[int, bool]]:
    """Ask all agents about one content after the other, each hearing those before it, those to learn from first.

    Yields:
        after each content, its number and whether it was one to learn from.
    """
    for number, content in enumerate([*taught, *measured]):
        teach = number < len(taught)
        place = f"{number + 1} of {len(taught)}" if teach else f"{number + 1 - len(taught)} of {len(measured)}"
        text = f"{'teaching' if teach else 'measuring'}, content {place}"
        turns: list[Turn] = []
        for agent in agents:
            step(text)
            turns.append(ask(agent, content, turns, number=number, teach=teach))
            step(text, done=1)
        yield number, teach


def save(result: dict[str, Any], args: argparse.Namespace) -> None:
    """Write the JSON file and the plot (mean KL against repaired share, a point per policy), if asked for."""
    save_json(args, result)
    if args.plot is None:
        return
    with plot(args.plot, width=7) as axes:
        for name, score in result["policies"].items():
            if score["n"]:
                axes.scatter(score["repaired_share"], score["kl_mean"])
                axes.annotate(name, (score["repaired_share"], score["kl_mean"]))
        axes.set_xlabel("share of prompt tokens repaired")
        axes.set_ylabel("mean KL to dense over the answer's first tokens, nats")


def show_scores(result: dict[str, Any], own: Sequence[str]) -> None:
    """Print one row per policy: what both benchmarks measure, then a benchmark's own figures."""
    columns = ("kl_first", "kl_mean", "agreement", "prefix_match", "reuse_rate_calls", "reuse_rate_tokens",
               "repaired_share", *own)  # fmt: skip
    headings = ["policy", *(column.replace("_", " ") for column in columns)]
    rows = ([name, *(_number(score.get(column)) for column in columns)] for name, score in result["policies"].items())
    show("Distance from dense (KL in nats, full vocabulary)", headings, rows, width=200, left="policy")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 or (value == int(value) and value >= 2) else f"{value:.4f}"
