"""Does anybody wait so that the engine can learn? Agents with think times: dense, learning by sampling, in idle time.

The same sessions are played on one engine after another. In each, agents read one question in turn and think between
their calls; all but the first could load it. *sampling* runs a share of the users' requests densely to learn and to
audit; *shadow* does that by requests of its own while nobody asks. Then as many sessions as the engine serves at once
run without any pause, with and without shadow requests.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvcomm_integrations.bench.harness import Answer, ask, percentile, progress, save_json, show
from kvcomm_integrations.bench.prompting import Ids, PaperTeam, Sizes
from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.wire import Mode

WAYS: dict[str, dict[str, float]] = {
    "dense": {"idle_budget": 0},
    "sampling": {"idle_budget": 0, "learn_rate": 0.1, "audit_rate": 0.02},
    "shadow": {},
}
"""Settings of the engines that are compared."""
SHARES = (50, 95, 99)


@dataclass(frozen=True)
class Call:
    """One request of a session, by the place of its agent; what the engine said of it."""

    place: int
    answer: Answer


class Sessions:
    """Sessions of a team on one engine.

    Args:
        engine: the engine.
        agents: how many take turns.
        sizes: of prompts and answers.
        mode: how their requests run.
        think: mean of the time between two calls of a session, seconds.
        seed: for texts and times.
    """

    def __init__(self, engine: InProcessEngine, agents: int, sizes: Sizes, mode: Mode, think: float, seed: int) -> None:
        self._engine = engine
        self._team = PaperTeam(engine.tokenizer, agents, sizes, seed)
        self._mode = mode
        self._think = think

    def play(self, number: int, *, think: bool = True) -> list[Call]:
        """One session over a question of its own."""
        times = random.Random(number)
        question = self._team.question(number)
        answers: dict[str, Ids] = {}
        calls = []
        for place, agent in enumerate(self._team.names):
            prompt = self._team.write(agent, question, answers)
            sampling, session = self._team.answering(agent, number), f"{self._mode}-{number}"
            answer = ask(
                self._engine, prompt, sampling, agent, shared=True, salt="tail", session=session, mode=self._mode
            )
            answers[agent] = answer.tokens
            calls.append(Call(place, answer))
            if think:
                time.sleep(times.uniform(0.2, 1.8) * self._think)
        return calls


def figures(calls: Sequence[Call]) -> dict[str, float]:
    """Percentiles of the time to the first token, of all requests that could load, and how many of them ran densely."""
    later = [call.answer for call in calls if call.place]
    times = [answer.ttft_ms for answer in later]
    found = {f"p{share}": percentile(times, share) for share in SHARES}
    late = [answer.report.delayed_ms for answer in later if answer.report.delayed_ms]
    return found | {
        "requests": len(calls),
        "dense": sum(answer.report.mode is not Mode.AUTO for answer in later),
        "met": len(late),
        "delay_p95": percentile(late, 95) if late else 0.0,
        "longest_delay": max(late, default=0.0),
    }


def run_tail(args: argparse.Namespace) -> int:
    """Run ``kvcomm bench tail``; returns the exit status."""
    sizes = Sizes(args.prefix, args.input, args.output)
    sessions = -(-args.requests // args.agents)
    shared: dict[str, Any] = {
        "model": args.model, "dtype": args.dtype, "seed": args.seed,
        "max_model_len": sizes.longest(args.agents) + 64, "max_num_seqs": args.together,
    }  # fmt: skip
    found: dict[str, dict[str, float]] = {}
    rates: dict[str, list[float]] = {"off": [], "on": []}
    with progress() as step:
        for way, settings in WAYS.items():
            step(f"{way}: the engine starts")
            config = EngineConfig(**shared, reuse=ReuseConfig.model_validate(settings))
            with closing(InProcessEngine(config)) as engine:
                mode = Mode.DENSE if way == "dense" else Mode.AUTO
                play = Sessions(engine, args.agents, sizes, mode, args.think, args.seed)
                play.play(-1)
                calls: list[Call] = []
                for number in range(sessions):
                    step(f"{way}: session {number + 1} of {sessions}")
                    calls += play.play(number)
                found[way] = figures(calls)
        for way, budget in {"off": {"idle_budget": 0}, "on": {}}.items():
            config = EngineConfig(**shared, reuse=ReuseConfig.model_validate(budget))
            with closing(InProcessEngine(config)) as engine:
                play = Sessions(engine, args.agents, sizes, Mode.AUTO, 0.0, args.seed)
                numbers = count(sessions)
                for place in range(args.rounds + 1):
                    step(f"saturated, shadow requests {way}, round {place}")
                    rate = _saturate(play, [next(numbers) for _ in range(2 * args.together)], args.together)
                    rates[way] += [rate] if place else []  # the first one warms up
    _show(found, rates, args)
    save_json(args, {"ways": found, "requests_per_s": rates})
    return 0


def _saturate(play: Sessions, numbers: Sequence[int], together: int) -> float:
    """Requests a second where ``together`` sessions are always under way."""
    started = time.monotonic()
    with ThreadPoolExecutor(together) as pool:
        calls = [call for session in pool.map(lambda n: play.play(n, think=False), numbers) for call in session]
    return len(calls) / (time.monotonic() - started)


def _show(found: dict[str, dict[str, float]], rates: dict[str, list[float]], args: argparse.Namespace) -> None:
    headings = ["way", "requests", *(f"p{share}" for share in SHARES), "dense", "met one", "delay p95", "longest delay"]
    columns = ("requests", *(f"p{share}" for share in SHARES), "dense", "met", "delay_p95", "longest_delay")
    rows = [(way, *(f"{line[name]:,.0f}" for name in columns)) for way, line in found.items()]
    show(
        f"Time to the first token, ms, of requests that could load {args.input:,} tokens and more; "
        f"{args.agents} agents, think times of {args.think:g} s",
        headings,
        rows,
        width=140,
        left="way",
    )
    ratio = found["dense"]["p99"] / found["shadow"]["p99"]
    print(f"p99 with shadow requests: {ratio:.2f} times less than dense's.")
    middle = {way: percentile(values, 50) for way, values in rates.items()}
    print(
        f"Saturated, {args.together} sessions at once: {middle['on']:.2f} requests a second with shadow requests, "
        f"{middle['off']:.2f} without ({middle['on'] / middle['off'] - 1:+.1%}; medians of {args.rounds} rounds)."
    )
