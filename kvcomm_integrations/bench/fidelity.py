"""How far is reuse from dense? Runs fully connected agents on the real engine and audits every policy on every call.

Each agent answers densely, so that all policies see the same prompts and the same answers (teacher forcing). When a
request is over, the engine computes what each policy would have produced at the answer's first positions, over the full
vocabulary (see ``connector/audit.py``), and then lets the policies learn from it. Time to the first token is measured
afterwards, with real reusing requests.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvcomm_integrations.bench.asking import Asker
from kvcomm_integrations.bench.prompting import AGENTS, Turn
from kvcomm_integrations.bench.rounds import rounds
from kvcomm_integrations.bench.scores import Score, as_config, chosen_contents, chosen_policies, save, show_scores
from kvcomm_integrations.config import EngineConfig, Gate, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.reuse.traits import POLICY_NAMES, policy_traits
from kvcomm_integrations.wire import Mode

CURVE = ((0, 1), (1, 2), (2, 3), (3, 5), (5, 9), (9, 17))
"""Ranges of examples per edge for the learning curve."""

STATE_BYTES = 64 << 30
"""All policies learn side by side, and none may forget because others have taken the room."""


def run_fidelity(args: argparse.Namespace) -> int:
    """Run the benchmark as the command line asks for it and print its tables; returns the exit status.

    Raises:
        ConfigurationError: an unknown policy or option, or too few questions.
    """
    policies = chosen_policies(args)
    taught, measured = chosen_contents(args)
    variants = tuple(name for name in policies if name not in POLICY_NAMES)
    reuse = ReuseConfig(
        gate=Gate(args.gate),
        audit_rate=0,
        learn_rate=0,
        max_repair_share=1.0,
        variants=variants,
        state_bytes=STATE_BYTES,
        small_divergence=args.small_divergence,
    )
    engine = InProcessEngine(EngineConfig(model=args.model, max_model_len=8192, seed=args.seed, reuse=reuse))
    try:
        result = _measure(Asker(engine, args.max_tokens), policies, taught, measured, args)
    finally:
        engine.close()
    _show(result)
    save(result, args)
    return 0


def _measure(
    asker: Asker, policies: Sequence[str], taught: Sequence[str], measured: Sequence[str], args: argparse.Namespace
) -> dict[str, Any]:
    scores = {name: Score() for name in policies}
    curve = {name: [Score() for _ in CURVE] for name in policies}
    calls = 0
    agents = AGENTS[: args.agents]

    def ask(agent: str, content: str, turns: Sequence[Turn], number: int, teach: bool) -> Turn:
        session = f"fidelity-{number}"
        return asker.ask(agent, content, turns, session=session, policies=policies, teach=teach, tokens=args.tokens)

    with Progress(console=Console(stderr=True)) as progress:
        for number, teach in rounds(progress, taught, measured, agents, ask):
            calls += 0 if teach else len(agents) - 1
            for audit in filter(_loads_shared, asker.audits()):
                if not teach:
                    scores[audit["policy"]].add(audit)
                for place, (low, high) in enumerate(CURVE):
                    if teach and low <= number < high:
                        curve[audit["policy"]][place].add(audit)
        timing = progress.add_task("timing", total=len(policies))
        result = {name: score.summary() for name, score in scores.items()}
        stats = asker.engine.call_workers("kvcomm_stats")[0]
        for name in policies:
            result[name]["reuse_rate_calls"] = result[name]["n"] / calls if calls else 0.0
            state, edges = stats["policies"].get(name, 0), stats["edges"].get(name, 0)
            result[name]["state_bytes"] = state
            result[name]["state_bytes_per_edge"] = state / edges if edges else 0.0
            progress.update(timing, description=f"timing {name}")
            result[name]["ttft_ratio"] = _ttft_ratio(asker, name, measured, agents, len(taught), args.timed)
            progress.advance(timing)
    return {
        "policies": result,
        "curve": {
            name: [{"examples": low, **part.summary()} for (low, _), part in zip(CURVE, parts, strict=True)]
            for name, parts in curve.items()
        },
        "config": as_config(args),
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


def _show(result: dict[str, Any]) -> None:
    console = Console(width=200)
    columns = ("kl_first", "kl_mean", "agreement", "prefix_match", "reuse_rate_calls", "reuse_rate_tokens",
               "repaired_share", "state_bytes", "state_bytes_per_edge", "ttft_ratio", "n")  # fmt: skip
    show_scores(result, columns, console)
    learning = Table(title="While learning: mean KL / agreement by examples per edge")
    learning.add_column("policy")
    for low, high in CURVE:
        learning.add_column(str(low) if high == low + 1 else f"{low}-{high - 1}", justify="right")
    for name, parts in result["curve"].items():
        cells = [f"{p['kl_mean']:.4f} / {p['agreement']:.3f}" if p["n"] else "-" for p in parts]
        learning.add_row(name, *cells)
    console.print(learning)
