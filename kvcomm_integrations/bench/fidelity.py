"""How far is reuse from dense? Runs fully connected agents on the real engine and audits every policy on every call.

Each agent answers densely, so that all policies see the same prompts and the same answers (teacher forcing). When a
request is over, the engine computes what each policy would have produced at the answer's first positions, over the full
vocabulary (see ``connector/worker/audit.py``), and then lets the policies learn from it. Time to the first token is
measured afterwards, with real reusing requests.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from statistics import median
from typing import Any

from kvcomm_integrations.bench.harness import Step, ask, progress, show
from kvcomm_integrations.bench.prompting import AGENTS, TeamPrompts, Turn, greedy
from kvcomm_integrations.bench.scores import Score, chosen_contents, chosen_policies, rounds, save, show_scores
from kvcomm_integrations.config import EngineConfig, Gate, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.reuse.traits import POLICY_NAMES, policy_traits
from kvcomm_integrations.wire import Mode

CURVE = ((0, 1), (1, 2), (2, 3), (3, 5), (5, 9), (9, 17))
"""Ranges of examples per edge for the learning curve."""

STATE_BYTES = 64 << 30
"""All policies learn side by side, and none may forget because others have taken the room."""


def run_fidelity(args: argparse.Namespace) -> int:
    """Run ``kvcomm bench fidelity``; returns the exit status.

    Raises:
        ConfigurationError: an unknown policy or option, or too few questions.
    """
    policies = chosen_policies(args)
    taught, measured = chosen_contents(args)
    reuse = ReuseConfig(
        gate=Gate(args.gate),
        idle_budget=0,
        max_repair_share=1.0,
        variants=tuple(name for name in policies if name not in POLICY_NAMES),
        state_bytes=STATE_BYTES,
        small_divergence=args.small_divergence,
    )
    config = EngineConfig(model=args.model, dtype=args.dtype, max_model_len=8192, seed=args.seed, reuse=reuse)
    agents = AGENTS[: args.agents]
    total = (len(taught) + len(measured)) * len(agents) + len(policies)
    with closing(InProcessEngine(config)) as engine, progress(total=total) as step:
        result = FidelityBench(engine, policies, agents, args).measure(taught, measured, step)
    _show(result)
    save(result, args)
    return 0


class FidelityBench:
    """Fully connected agents on one engine, in the order in which they speak, and the policies that are audited."""

    def __init__(
        self, engine: InProcessEngine, policies: Sequence[str], agents: Sequence[str], args: argparse.Namespace
    ) -> None:
        self.engine, self.policies, self.agents, self.args = engine, policies, agents, args
        self._turns: dict[int, list[Turn]] = {}
        self._prompts = TeamPrompts(engine.tokenizer)

    def measure(self, taught: Sequence[str], measured: Sequence[str], step: Step) -> dict[str, Any]:
        """Teach, measure, and time every policy; the figures by policy."""
        scores = {name: Score() for name in self.policies}
        curve = {name: [Score() for _ in CURVE] for name in self.policies}
        for number, teach in rounds(step, taught, measured, self.agents, self._answer):
            self.engine.drain()
            audits = [audit for rank in self.engine.call_workers("kvcomm_take_audits") for audit in rank]
            for audit in filter(_loads_shared, audits):
                if not teach:
                    scores[audit["policy"]].audits.append(audit)
                for place, (low, high) in enumerate(CURVE):
                    if teach and low <= number < high:
                        curve[audit["policy"]][place].audits.append(audit)
        stats = self.engine.call_workers("kvcomm_stats")[0]
        calls = len(measured) * (len(self.agents) - 1)
        result = {}
        for name, score in scores.items():
            step(f"timing {name}")
            result[name] = score.result(calls, stats["policies"].get(name, 0), stats["edges"].get(name, 0))
            result[name]["ttft_ratio"] = self._ttft_ratio(name, measured[: self.args.timed], len(taught))
            step(f"timing {name}", done=1)
        learning = {
            name: [{"examples": low, **part.summary()} for (low, _), part in zip(CURVE, parts, strict=True)]
            for name, parts in curve.items()
        }
        return {"policies": result, "curve": learning}

    def _answer(self, agent: str, content: str, turns: Sequence[Turn], *, number: int, teach: bool) -> Turn:
        """A dense answer, audited under every policy once it is over."""
        how: dict[str, Any] = {"mode": Mode.OBSERVE, "teach": teach, "audit_tokens": self.args.tokens - 1}
        prompt, sampling = self._prompts.write(agent, content, turns), greedy(self.args.max_tokens)
        how |= {"session": f"fidelity-{number}", "audit": self.policies}
        turn = Turn(agent, ask(self.engine, prompt, sampling, agent, shared=True, **how).tokens)
        self._turns.setdefault(number, []).append(turn)
        return turn

    def _ttft_ratio(self, policy: str, contents: Sequence[str], first: int) -> float:
        """Median time to first token of the last agent, dense over reuse, the prefix cache emptied before each."""
        traits = policy_traits(policy)
        if traits is None or traits.needs_truth or not contents:
            return 0.0
        times: dict[Mode, list[float]] = {Mode.DENSE: [], Mode.AUTO: []}
        for number, content in enumerate(contents, first):
            prompt = self._prompts.write(self.agents[-1], content, self._turns[number][: len(self.agents) - 1])
            for mode, found in times.items():
                self.engine.reset_prefix_cache()
                how: dict[str, Any] = {"session": f"fidelity-{number}", "mode": mode, "policy": policy}
                found.append(ask(self.engine, prompt, greedy(1), self.agents[-1], **how).ttft_ms)
        return median(times[Mode.DENSE]) / median(times[Mode.AUTO])


def _loads_shared(audit: dict[str, Any]) -> bool:
    """Something that agents share was loaded, not only an agent's own template text."""
    return any(not name.startswith("fixed:") for _, _, name, _ in audit["edges"])


def _show(result: dict[str, Any]) -> None:
    show_scores(result, ("state_bytes", "state_bytes_per_edge", "ttft_ratio", "n"))
    headings = ["policy", *(str(low) if high == low + 1 else f"{low}-{high - 1}" for low, high in CURVE)]
    rows = [
        [name, *(f"{part['kl_mean']:.4f} / {part['agreement']:.3f}" if part["n"] else "-" for part in parts)]
        for name, parts in result["curve"].items()
    ]
    title = "While learning: mean KL / agreement by examples per edge"
    show(title, headings, rows, width=200, left="policy")
