"""How far is reuse from dense? The same comparison on Hugging Face transformers, without the engine.

Besides the distributions it compares the estimated keys and values themselves with the true ones, layer by layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvcomm_integrations.bench.hf_bench import Bench
from kvcomm_integrations.bench.hf_model import HFModel
from kvcomm_integrations.bench.prompting import AGENTS, Turn
from kvcomm_integrations.bench.rounds import rounds
from kvcomm_integrations.bench.scores import as_config, chosen_contents, chosen_policies, save, show_scores
from kvcomm_integrations.config import Gate

COLUMNS = 8
"""Groups of layers in the printed table."""


def run_hf_fidelity(args: argparse.Namespace) -> int:
    """Run the benchmark as the command line asks for it and print its tables; returns the exit status.

    Raises:
        ConfigurationError: an unknown policy or option, or too few questions.
        UnsupportedModelError: the model's rotation is not known.
    """
    policies = chosen_policies(args)
    taught, measured = chosen_contents(args)
    bench = Bench(HFModel(args.model), policies, args.max_tokens, args.tokens, Gate(args.gate))
    result = measure(bench, taught, measured, AGENTS[: args.agents]) | {"config": as_config(args)}
    _show(result)
    save(result, args)
    return 0


def measure(bench: Bench, taught: Sequence[str], measured: Sequence[str], agents: Sequence[str]) -> dict[str, Any]:
    """Teach, then measure; the figures by policy."""

    def ask(agent: str, content: str, turns: Sequence[Turn], number: int, teach: bool) -> Turn:
        return bench.ask(agent, content, turns, teach=teach)

    with Progress(console=Console(stderr=True)) as progress:
        for _ in rounds(progress, taught, measured, agents, ask):
            bench.forget_contents()
    calls = len(measured) * (len(agents) - 1)
    result: dict[str, dict[str, Any]] = {}
    for name, policy in bench.policies.items():
        score = bench.scores[name].summary()
        edges = len(policy.edges())
        result[name] = {
            **score,
            "reuse_rate_calls": score["n"] / calls if calls else 0.0,
            "state_bytes": policy.state_bytes(),
            "state_bytes_per_edge": policy.state_bytes() / edges if edges else 0.0,
            **(bench.errors[name].summary() if name in bench.errors else {}),
        }
    return {"policies": result}


def _show(result: dict[str, Any]) -> None:
    console = Console(width=200)
    columns = ("kl_first", "kl_mean", "agreement", "prefix_match", "reuse_rate_calls", "reuse_rate_tokens",
               "repaired_share", "explained_keys", "explained_values", "state_bytes_per_edge", "n")  # fmt: skip
    show_scores(result, columns, console)
    table = Table(title="Relative error of loaded keys / values by layer")
    table.add_column("policy", no_wrap=True)
    scored = {name: score for name, score in result["policies"].items() if "key_error" in score}
    layers = max((len(score["key_error"]) for score in scored.values()), default=0)
    width = -(-layers // COLUMNS)
    groups = [range(start, min(start + width, layers)) for start in range(0, layers, width)] if layers else []
    for group in groups:
        table.add_column(f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]), justify="right", no_wrap=True)
    for name, score in scored.items():
        cells = [
            f"{mean(score['key_error'][i] for i in group):.3f} / {mean(score['value_error'][i] for i in group):.3f}"
            for group in groups
        ]
        table.add_row(name, *cells)
    console.print(table)
