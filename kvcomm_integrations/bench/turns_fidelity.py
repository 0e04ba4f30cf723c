"""Do estimates add up over a conversation? Each turn with reuse against a dense run of the same messages.

A conversation goes on from what reuse has answered. At every turn the same messages are answered densely too, for
another tenant, so that nothing exact is left for the next turn. Both answers are the likeliest words; they are compared
position by position, for as long as the words before are the same.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from langchain_core.messages import AIMessage

from kvcomm_integrations.bench.harness import save_json, show
from kvcomm_integrations.bench.turns import Conversation, learned
from kvcomm_integrations.wire import Mode

TOP = 20
"""Likeliest tokens that divergences are taken over: the most that vLLM tells by default."""
POSITIONS = 16
"""Most positions of an answer that are compared."""


def compare_answers(dense: Sequence[dict[str, Any]], reuse: Sequence[dict[str, Any]]) -> tuple[list[float], list[bool]]:
    """KL of each position, nats over the dense run's likeliest tokens, and whether both have the same likeliest token.

    The first position that differs is compared; after it the words before are not the same.

    Args:
        dense: log-probabilities of the dense answer, as OpenAI's API tells them.
        reuse: those of the answer with reuse.
    """
    divergences, same = [], []
    for one, other in zip(dense[:POSITIONS], reuse[:POSITIONS], strict=False):
        guesses = {top["token"]: top["logprob"] for top in other["top_logprobs"]}
        least = min(guesses.values())
        pairs = [(top["logprob"], guesses.get(top["token"], least)) for top in one["top_logprobs"]]
        divergences.append(max(0.0, sum(math.exp(true) * (true - guess) for true, guess in pairs)))
        same.append(one["token"] == other["token"])
        if not same[-1]:
            break
    return divergences, same


def run_turns_fidelity(args: argparse.Namespace) -> int:
    """Run ``kvcomm bench turns --fidelity``; returns the exit status."""
    turns: list[list[dict[str, Any]]] = [[] for _ in range(args.turns)]
    with learned(args, args.rounds) as (make, step):
        for number in range(args.rounds):
            step(f"conversation {number + 1}", done=1)
            talk = replace(make(number, Mode.AUTO), logprobs=TOP)
            for turn, seen in enumerate(turns):
                twin = replace(talk, mode=Mode.DENSE, tenant="dense", said=list(talk.said))
                run = talk.turn(args.scenario, turn, args.agents)
                twin.turn(args.scenario, turn, args.agents)
                kl, same = compare_answers(_words(twin), _words(talk))
                seen.append({"kl": kl, "same": same, "carried": run.carried, "loaded": run.loaded})
    lines = [summary(seen) for seen in turns]
    headings = ["turn", "kl_first", "kl_mean", "agreement", "carried", "loaded"]
    rows = [
        (str(turn), *(f"{line[name]:.4f}" for name in headings[1:4]), *(f"{line[name]:.0f}" for name in headings[4:]))
        for turn, line in enumerate(lines)
    ]
    title = f"{args.scenario}: reuse against a dense run of the same messages, {args.policy or 'ridge'}; means"
    show(f"{title} of {args.rounds} conversations", headings, rows)
    half = len(lines) // 2
    first, second = (mean(line["kl_mean"] for line in part) for part in (lines[1:half], lines[half:]))
    print(f"Mean KL: {first:.4f} in the first half of the turns, {second:.4f} in the second.")
    save_json(args, {"scenario": args.scenario, "fidelity": lines, "turns": turns})
    return 0


def _words(talk: Conversation) -> list[dict[str, Any]]:
    """Log-probabilities of the latest answer."""
    _, answer = talk.said[-1]
    assert isinstance(answer, AIMessage)
    return list(answer.response_metadata["logprobs"]["content"])


def summary(seen: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means of one turn over all conversations."""
    return {
        "kl_first": mean(one["kl"][0] for one in seen),
        "kl_mean": mean(kl for one in seen for kl in one["kl"]),
        "agreement": mean(same for one in seen for same in one["same"]),
        "carried": mean(one["carried"] for one in seen),
        "loaded": mean(one["loaded"] for one in seen),
    }
