"""Can one tenant find out what another has sent? Times guesses at contents that a victim has or has not sent.

The attacker knows the victim's prompt but for its content, and asks the same about each guess, through an agent of the
same name. Under the default isolation nothing tells right guesses from wrong ones; ``global`` is the control.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from statistics import median

from kvcomm_integrations.bench.harness import Answer, Step, ask, progress, save_json, show
from kvcomm_integrations.bench.problems import generate_problems
from kvcomm_integrations.bench.prompting import AGENTS, TeamPrompts, greedy
from kvcomm_integrations.config import EngineConfig, Isolation, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.ids import tenant_salt

TOKENS = 4
"""Length of answers, tokens."""


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


@dataclass(frozen=True)
class Attack:
    """Victim and attacker on one engine that is configured with an isolation."""

    engine: InProcessEngine
    isolation: Isolation

    def ask(self, tenant: str, agent: str, content: str) -> Answer:
        """One request of a tenant."""
        salt = None if self.isolation is Isolation.GLOBAL else tenant_salt(tenant)
        prompt = TeamPrompts(self.engine.tokenizer).write(agent, content, [])
        return ask(self.engine, prompt, greedy(TOKENS), agent, salt=salt, tenant=tenant, session="s")

    def guess(self, content: str, *, sent: bool) -> Answer:
        """What the attacker sees of a content on an engine that has seen nothing, or only the victim's request."""
        self.engine.drain()
        self.engine.reset_prefix_cache(references=True, corrections=True)
        self.ask("attacker", AGENTS[1], "Hello.")  # the attacker's own template is warm either way
        if sent:
            self.ask("victim", AGENTS[0], content)
            self.ask("victim", AGENTS[1], content)
        seen = self.ask("attacker", AGENTS[1], content)
        assert seen.report.prompt_tokens, "without a report it cannot be told whether anything was reused"
        return seen


def measure(engine: InProcessEngine, isolation: Isolation, contents: Sequence[str], seed: int, step: Step) -> Finding:
    """Guess at every content twice: once the victim has sent it, once nobody has."""
    attack, order = Attack(engine, isolation), random.Random(seed)
    attack.ask("warmer", AGENTS[0], contents[0])
    guesses: dict[bool, list[Answer]] = {True: [], False: []}
    for number, content in enumerate(contents, 1):
        for right in order.sample([True, False], 2):
            guesses[right].append(attack.guess(content, sent=right))
        step(f"{isolation}: content {number} of {len(contents)}", done=1)
    times = {right: [guess.ttft_ms for guess in found] for right, found in guesses.items()}
    reused = {right: sum(guess.report.exact + guess.report.loaded for guess in guesses[right]) for right in guesses}
    return Finding(
        isolation=isolation.value,
        guesses=len(contents),
        right_ms=round(median(times[True]), 2),
        wrong_ms=round(median(times[False]), 2),
        advantage=round(advantage(times[True], times[False]), 3),
        reused_right=(reused[True] - reused[False]) // len(contents),
        answers_equal=[guess.tokens for guess in guesses[True]] == [guess.tokens for guess in guesses[False]],
    )


def run_isolation(args: argparse.Namespace) -> int:
    """``kvcomm bench isolation``: a line per isolation. Exit status 1 if any but ``global`` gives something away."""
    contents = [problem.question for problem in generate_problems(args.guesses, seed=args.seed)]
    findings = []
    with progress(total=len(Isolation) * len(contents)) as step:
        for isolation in Isolation:
            reuse = ReuseConfig(isolation=isolation, idle_budget=0)
            config = EngineConfig(model=args.model, max_model_len=2048, block_size=32, reuse=reuse)
            with closing(InProcessEngine(config)) as engine:
                findings.append(measure(engine, isolation, contents, args.seed, step))
    headings = ("isolation", "right, ms", "wrong, ms", "right is faster", "tokens reused", "same answers")
    rows = []
    for f in findings:
        times, same = (f"{f.right_ms:.0f}", f"{f.wrong_ms:.0f}"), "yes" if f.answers_equal else "no"
        rows.append((f.isolation, *times, f"{f.advantage:.2f}", f"{f.reused_right:+d}", same))
    show(f"{len(contents)} contents, each guessed right and wrong", headings, rows)
    save_json(args, [asdict(finding) for finding in findings])
    leaks = {finding.isolation for finding in findings if finding.reused_right or not finding.answers_equal}
    return int(bool(leaks - {Isolation.GLOBAL.value}))
