"""Shows what the demo measured: a table for people, JSON for programs."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from kvcomm_integrations.bench.harness import print_table
from kvcomm_integrations.demo.measure import AgentCalls, Comparison

TOKENS = ("prompt_tokens", "exact", "carried", "loaded", "repaired", "computed")


def show(comparison: Comparison) -> None:
    """Print one line per agent to standard output."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    print_table(
        console,
        "Time to first token, dense with prefix caching against KV reuse (medians)",
        ["agent", "prompt", *TOKENS[1:], "dense ms", "reuse ms", "speed-up", "identical"],
        (
            (
                agent.name,
                *(f"{agent.tokens(kind):.0f}" for kind in TOKENS),
                f"{agent.ttft_dense_ms:.0f}",
                f"{agent.ttft_reuse_ms:.0f}",
                f"{agent.speedup:.2f}x",
                f"{agent.identical:.0%}",
            )
            for agent in comparison.agents
        ),
        left=["agent"],
    )
    dense_runs = sum(agent.learning for agent in comparison.agents[1:])
    console.print(
        "Tokens: exact = prefix cache, carried = its own last turn, loaded = another agent's KV, repaired = computed "
        "in the repair pass, computed = vLLM's own forward.\nThe first agent has nobody to load from. "
        f"{dense_runs} of the other agents' calls ran densely, to learn or to audit.\n"
        "Later agents answer answers: once two runs differ in a word, all that follows may differ."
    )


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The same as a JSON object: ``{"agents": [...], "config": {...}}``; times in milliseconds, tokens as medians."""
    return {"agents": [_agent(agent) for agent in comparison.agents], "config": comparison.config}


def _agent(agent: AgentCalls) -> dict[str, Any]:
    return {
        "name": agent.name,
        **{kind: agent.tokens(kind) for kind in TOKENS},
        "ttft_dense_ms": round(agent.ttft_dense_ms, 1),
        "ttft_reuse_ms": round(agent.ttft_reuse_ms, 1),
        "speedup": round(agent.speedup, 2),
        "identical_answers": agent.identical,
        "dense_runs": agent.learning,
    }
