"""Can one tenant find out what another has sent? Times guesses at contents that a victim has or has not sent.

The attacker knows the victim's prompt but for its content, and asks the same about each guess, through an agent of the
same name. Under the default isolation nothing tells right guesses from wrong ones; ``global`` is the control.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from kvcomm_integrations.bench.problems import generate_problems
from kvcomm_integrations.bench.prompting import AGENTS, TeamPrompts
from kvcomm_integrations.config import EngineConfig, Isolation, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.engines.interface import Delta, GenerationRequest, SamplingOptions
from kvcomm_integrations.ids import tenant_salt

TOKENS = 4
"""Length of answers, tokens."""


@dataclass(frozen=True)
class Guess:
    """What the attacker saw of one guess."""

    right: bool
    """The victim had sent the content."""
    ttft_ms: float
    exact: int
    loaded: int
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """What an isolation gives away."""

    isolation: str
    guesses: int
    right_ms: float
    """Median time to the first token for contents the victim has sent, milliseconds."""
    wrong_ms: float
    """The same for contents nobody has sent."""
    advantage: float
    """Chance that a right guess is faster than a wrong one; 0.5: timing tells nothing."""
    reused_right: int
    """Tokens that reports of right guesses say were reused, beyond those of wrong guesses, on average."""
    answers_equal: bool
    """The attacker's answers are the same whether or not the victim has sent the content."""


def advantage(right: Sequence[float], wrong: Sequence[float]) -> float:
    """Chance that a value of ``right`` is smaller than one of ``wrong``, ties counting half."""
    pairs = [(a < b) + 0.5 * (a == b) for a in right for b in wrong]
    return sum(pairs) / len(pairs)


class Attack:
    """Victim and attacker on one engine.

    Args:
        engine: the engine they share.
        isolation: how it is configured.
    """

    def __init__(self, engine: InProcessEngine, isolation: Isolation) -> None:
        self.engine = engine
        self._salted = isolation is not Isolation.GLOBAL
        self._prompts = TeamPrompts(engine.tokenizer)

    def ask(self, tenant: str, agent: str, content: str, session: str) -> list[Delta]:
        """One request of a tenant."""
        prompt = self._prompts.write(agent, content, [])
        params = prompt.params(agent=agent, tenant=tenant, session=session)
        sampling = SamplingOptions(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        salt = tenant_salt(tenant) if self._salted else None
        return list(self.engine.generate_sync(GenerationRequest(prompt, params, sampling, cache_salt=salt)))

    def guess(self, content: str, right: bool) -> Guess:
        """The attacker's view of one content."""
        deltas = self.ask("attacker", AGENTS[1], content, "s")
        report = deltas[-1].report
        assert report is not None
        answer = tuple(token for delta in deltas for token in delta.token_ids)
        return Guess(right, deltas[-1].ttft_ms or 0.0, report.exact, report.loaded, answer)

    def forget(self) -> None:
        """Back to an engine that has seen nothing."""
        self.engine.drain()
        self.engine.reset_prefix_cache(references=True, corrections=True)


def measure(engine: InProcessEngine, isolation: Isolation, contents: Sequence[str], seed: int) -> Finding:
    """Guess at every content twice: once the victim has sent it, once nobody has."""
    attack, order = Attack(engine, isolation), random.Random(seed)
    attack.ask("warmer", AGENTS[0], contents[0], "s")
    guesses: dict[bool, list[Guess]] = {True: [], False: []}
    for content in contents:
        for right in order.sample([True, False], 2):
            attack.forget()
            attack.ask("attacker", AGENTS[1], "Hello.", "s")  # the attacker's own template is warm either way
            if right:
                attack.ask("victim", AGENTS[0], content, "s")
                attack.ask("victim", AGENTS[1], content, "s")
            guesses[right].append(attack.guess(content, right))
    times = {right: [guess.ttft_ms for guess in found] for right, found in guesses.items()}
    reused = {right: sum(guess.exact + guess.loaded for guess in found) for right, found in guesses.items()}
    return Finding(
        isolation=isolation.value,
        guesses=len(contents),
        right_ms=round(median(times[True]), 2),
        wrong_ms=round(median(times[False]), 2),
        advantage=round(advantage(times[True], times[False]), 3),
        reused_right=(reused[True] - reused[False]) // len(contents),
        answers_equal=[guess.answer for guess in guesses[True]] == [guess.answer for guess in guesses[False]],
    )


def run_isolation(args: argparse.Namespace) -> int:
    """``kvcomm bench isolation``: a line per isolation. Exit status 1 if any but ``global`` gives something away."""
    contents = [problem.question for problem in generate_problems(args.guesses, seed=args.seed)]
    findings = []
    for isolation in (Isolation.SESSION, Isolation.TENANT, Isolation.GLOBAL):
        reuse = ReuseConfig(isolation=isolation, audit_rate=0.0, learn_rate=0.0)
        engine = InProcessEngine(EngineConfig(model=args.model, max_model_len=2048, block_size=32, reuse=reuse))
        try:
            findings.append(measure(engine, isolation, contents, args.seed))
        finally:
            engine.close()
    _show(findings)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(finding) for finding in findings], indent=1))
    kept = [finding for finding in findings if finding.isolation != Isolation.GLOBAL.value]
    return int(any(finding.reused_right or not finding.answers_equal for finding in kept))


def _show(findings: Sequence[Finding]) -> None:
    table = Table(title=f"{findings[0].guesses} contents, each guessed right and wrong")
    for column in ("isolation", "right, ms", "wrong, ms", "right is faster", "tokens reused", "same answers"):
        table.add_column(column, justify="right")
    for finding in findings:
        table.add_row(
            finding.isolation,
            f"{finding.right_ms:.0f}",
            f"{finding.wrong_ms:.0f}",
            f"{finding.advantage:.2f}",
            f"{finding.reused_right:+d}",
            "yes" if finding.answers_equal else "no",
        )
    Console(file=sys.stdout).print(table)
