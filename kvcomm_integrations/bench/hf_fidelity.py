"""How far is reuse from dense? The same comparison on Hugging Face transformers, without the engine.

Besides the distributions it compares the estimated keys and values themselves with the true ones, layer by layer.
"""

from __future__ import annotations

import argparse
from statistics import mean
from typing import Any

from kvcomm_integrations.bench.harness import progress, show
from kvcomm_integrations.bench.hf_bench import Bench
from kvcomm_integrations.bench.hf_model import HFModel
from kvcomm_integrations.bench.prompting import AGENTS
from kvcomm_integrations.bench.scores import chosen_contents, chosen_policies, rounds, save, show_scores
from kvcomm_integrations.config import Gate

COLUMNS = 8
"""Groups of layers in the printed table."""


def run_hf_fidelity(args: argparse.Namespace) -> int:
    """Run ``kvcomm bench fidelity --hf``; returns the exit status.

    Raises:
        ConfigurationError: an unknown policy or option, or too few questions.
        UnsupportedModelError: the model's rotation is not known.
    """
    policies = chosen_policies(args)
    taught, measured = chosen_contents(args)
    agents = AGENTS[: args.agents]
    bench = Bench(HFModel(args.model), policies, args.max_tokens, args.tokens, Gate(args.gate))
    with progress("teaching", total=(len(taught) + len(measured)) * len(agents)) as step:
        for _ in rounds(step, taught, measured, agents, lambda *who, number, teach: bench.ask(*who, teach=teach)):
            bench.forget_contents()
    calls = len(measured) * (len(agents) - 1)
    scores: dict[str, dict[str, Any]] = {}
    for name, policy in bench.policies.items():
        scores[name] = bench.scores[name].result(calls, policy.state_bytes(), len(policy.edges()))
        if name in bench.errors:
            scores[name] |= bench.errors[name].summary()
    result = {"policies": scores}
    _show(result)
    save(result, args)
    return 0


def _show(result: dict[str, Any]) -> None:
    show_scores(result, ("explained_keys", "explained_values", "state_bytes_per_edge", "n"))
    scored = {name: score for name, score in result["policies"].items() if "key_error" in score}
    layers = max((len(score["key_error"]) for score in scored.values()), default=0)
    width = max(1, -(-layers // COLUMNS))
    groups = [range(start, min(start + width, layers)) for start in range(0, layers, width)]

    def cell(score: dict[str, Any], group: range) -> str:
        return " / ".join(f"{mean(score[side][layer] for layer in group):.3f}" for side in ("key_error", "value_error"))

    headings = ["policy", *(f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups)]
    rows = ([name, *(cell(score, group) for group in groups)] for name, score in scored.items())
    show("Relative error of loaded keys / values by layer", headings, rows, width=200, left="policy")
