"""Shows what the demo measured: a table for people, JSON for programs."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from kvcomm_integrations.bench.harness import print_table
from kvcomm_integrations.demo.measure import Comparison
from kvcomm_integrations.report.words import fixed
from kvcomm_integrations.wire import TREATMENTS


def show(comparison: Comparison) -> None:
    """Print one line per agent to standard output."""
    agents = comparison.agents()
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    print_table(
        console,
        "Time to first token, dense with prefix caching against KV reuse (medians)",
        ["agent", "prompt", *TREATMENTS, "dense ms", "reuse ms", "speed-up", "identical"],
        (
            (
                agent.name,
                *(f"{tokens:.0f}" for tokens in agent.tokens.values()),
                fixed(agent.dense_ms, 0),
                fixed(agent.reuse_ms, 0),
                f"{fixed(agent.speedup, 2)}x",
                f"{comparison.identical[agent.name]:.0%}",
            )
            for agent in agents
        ),
        left=["agent"],
    )
    dense_runs = sum(comparison.learning(agent.name) for agent in agents[1:])
    console.print(
        "Tokens: exact = prefix cache, carried = its own last turn, loaded = another agent's KV, repaired = computed "
        "in the repair pass, computed = vLLM's own forward.\nThe first agent has nobody to load from. "
        f"{dense_runs} of the other agents' calls ran densely, to learn or to audit.\n"
        "Later agents answer answers: once two runs differ in a word, all that follows may differ."
    )


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The same as a JSON object: ``{"agents": [...], "config": {...}}``; times in milliseconds, tokens as medians."""
    agents = [
        {
            "name": agent.name,
            "prompt_tokens": agent.tokens["prompt"],
            **{kind: agent.tokens[kind] for kind in TREATMENTS},
            "ttft_dense_ms": round(agent.dense_ms or 0.0, 1),
            "ttft_reuse_ms": round(agent.reuse_ms or 0.0, 1),
            "speedup": round(agent.speedup or 0.0, 2),
            "identical_answers": comparison.identical[agent.name],
            "dense_runs": comparison.learning(agent.name),
        }
        for agent in comparison.agents()
    ]
    return {"agents": agents, "config": comparison.config}
