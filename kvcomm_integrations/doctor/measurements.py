"""Is what reuse gives right on this machine, and what does it gain and cost? The table of ``kvcomm doctor --smoke``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from kvcomm_integrations.bench.gpu import SPARE, harvest_times
from kvcomm_integrations.bench.harness import Answer, ask
from kvcomm_integrations.bench.prompting import PaperTeam, Sizes, greedy
from kvcomm_integrations.doctor.finding import Measured, State
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.engines.interface import GenerationRequest
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.wire import KVCommParams, Mode, RequestReport, Segment, SegmentKind

PREFIX, ANSWER, SHORT, LEAST = 128, 32, 384, 64
"""Tokens of a system prompt, of an answer, of the content on which results are compared, of the shortest content."""
WHOLE = "doctor:whole prompt"
"""Name of the content that is nearly all of a prompt."""
LARGEST = {"float32": 1e-3, "float16": 5e-2}
"""Greatest relative distance between the repair pass and vLLM's own forward, by dtype."""
LARGEST_BFLOAT16 = 1e-1
LARGEST_SHIFT = 0.5
"""Greatest difference of log-probabilities of an answer's first token in half precision; 0.01 in float32."""
OFF = """until that is solved, switch reuse off: reuse={"enabled": False} (a server: --reuse '{"enabled": false}')"""

logger = logging.getLogger(__name__)


@dataclass
class SelfTest:
    """What is to be measured, and the figures that were."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Of ``EngineConfig``, as the user would start the engine."""
    content: int = 4096
    """Tokens of the content that is loaded; fewer where the context is short."""
    rounds: int = 3
    figures: dict[str, Any] = field(default_factory=dict)


def measure(engine: InProcessEngine, test: SelfTest, dtype: str) -> Iterator[Measured]:
    """All lines of the table; the engine must serve nobody else, and have reuse on, with nothing left to chance."""
    room = engine.max_model_len - Sizes(PREFIX, 0, ANSWER).longest(2) - SPARE
    if room < LEAST:
        yield Measured("contents", State.SKIPPED, f"no room for {LEAST} tokens", "raise --max-model-len")
        return
    content = min(test.content, room)
    team = PaperTeam(engine.tokenizer, 2, Sizes(PREFIX, content, ANSWER))
    yield from _results(engine, team, test.figures, dtype)
    dense, reuse = _rounds(engine, team, test.rounds)
    harvest = harvest_times(engine, team, test.rounds)
    test.figures |= {
        "content": content,
        "ttft_ms": {"dense": [a.ttft_ms for a in dense], "reuse": [a.ttft_ms for a in reuse]},
        "tokens_per_s": {"dense": [a.tokens_per_s for a in dense], "reuse": [a.tokens_per_s for a in reuse]},
        "reports": [a.report.model_dump(mode="json") for a in reuse],
        "harvest": harvest,
    }
    yield from judge_rounds(content, dense, reuse, harvest)


def _results(engine: InProcessEngine, team: PaperTeam, figures: dict[str, Any], dtype: str) -> Iterator[Measured]:
    """Whether dense answers, the repair pass and a load into its own context give what they must."""
    agent = team.names[0]
    prompt = team.write(agent, team.question(0)[:SHORT], {})
    ids, end = prompt.token_ids, len(prompt.token_ids) - 1
    whole = SegmentedPrompt(ids, (Segment(kind=SegmentKind.PLACEHOLDER, name=WHOLE, start=0, end=end),))
    answers = [
        _greedy(engine, whole, agent, session=f"doctor-whole-{number}", mode=mode)
        for number, mode in enumerate((Mode.OBSERVE, Mode.DENSE, Mode.DENSE))
    ]
    yield same_answers("dense answers", answers[1], answers[2], dtype)
    errors: list[float | None] = []
    if engine.repair_refusal is None:
        middle = end // 2
        try:
            for gaps in ([[0, end]], [[0, 5], [middle, middle + 1], [middle + 9, middle + 80], [end - 9, end]]):
                errors += engine.call_workers("kvcomm_check_engine", WHOLE, list(ids[:end]), gaps)
            yield repair_agrees(errors, dtype)
        except Exception as error:  # whatever fails in a worker is what this is to find
            logger.exception("The repair pass failed")
            yield Measured("repair pass", State.BAD, f"failed: {error}", OFF)
    answers += [_greedy(engine, prompt, agent, session="doctor-own") for _ in range(2)]
    figures |= {"repair_errors": errors, "answers": [asdict(answer) for answer in answers]}
    yield own_context(answers[1], answers[-1], dtype)


@dataclass(frozen=True)
class Greedy:
    """A greedy answer."""

    tokens: tuple[int, ...]
    first: dict[int, float]
    """Log-probabilities of what is likeliest as its first token."""
    loaded: int = 0
    reason: str = ""


def _greedy(engine: InProcessEngine, prompt: SegmentedPrompt, agent: str, **params: Any) -> Greedy:
    """Ask with an empty prefix cache, and wait until the answer has been harvested."""
    engine.reset_prefix_cache()
    wire = KVCommParams(segments=prompt.segments, agent=agent, teach=False, **params)
    deltas = list(engine.generate_sync(GenerationRequest(prompt, wire, replace(greedy(ANSWER), logprobs=4))))
    engine.drain()
    first = next(logprob for delta in deltas for logprob in delta.logprobs)
    report = deltas[-1].report or RequestReport()
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    return Greedy(tokens, {token: value for token, _, value in first.top}, report.loaded, report.reason)


def own_context(dense: Greedy, back: Greedy, dtype: str) -> Measured:
    """Whether a prompt whose content was loaded back into its own context is answered as densely."""
    name = "load into its own context"
    if back.loaded:
        return same_answers(name, dense, back, dtype)
    return Measured(name, State.BAD, f"nothing was loaded: {back.reason}", "see docs/troubleshooting.md")


def same_answers(name: str, one: Greedy, other: Greedy, dtype: str) -> Measured:
    """Whether two answers agree. In half precision they may part where tokens are about as likely."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    agree = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens), len(other.tokens)))
    shift = _shift(one.first, other.first)
    found = f"{agree} of {len(one.tokens)} tokens agree, log-probabilities to {shift:.2g}"
    exact = dtype == "float32"
    wrong = shift > (0.01 if exact else LARGEST_SHIFT) or (exact and one.tokens != other.tokens)
    return Measured(name, State.BAD, found, OFF) if wrong else Measured(name, State.GOOD, found)


def _shift(one: dict[int, float], other: dict[int, float]) -> float:
    """How far log-probabilities of the likeliest tokens are apart, at least: what a side lacks is below all it has."""
    if not one.keys() & other.keys():
        return float("inf")
    sides = ((one, other), (other, one))
    return max(abs(p - b.get(token, min(p, *b.values()))) for a, b in sides for token, p in a.items())


def repair_agrees(errors: Sequence[float | None], dtype: str) -> Measured:
    """Whether the repair pass agrees with vLLM's own forward, going by each worker's relative distances."""
    known = [error for error in errors if error is not None]
    if len(known) < len(errors) or not known:
        return Measured("repair pass", State.BAD, "the KV that vLLM computed was not kept", OFF)
    found = f"{max(known):.1e} from vLLM's own forward"
    if max(known) <= LARGEST.get(dtype, LARGEST_BFLOAT16):
        return Measured("repair pass", State.GOOD, found)
    return Measured("repair pass", State.BAD, found, OFF)


def _rounds(engine: InProcessEngine, team: PaperTeam, rounds: int) -> tuple[list[Answer], list[Answer]]:
    """The second agent's requests, dense and with reuse, after a round that compiles, captures and teaches."""
    first, second = team.names
    answers: dict[Mode, list[Answer]] = {mode: [] for mode in Mode}
    for number in range(rounds + 1):
        question, session = team.question(number + 1), f"doctor-{number}"
        engine.reset_prefix_cache()
        ask(engine, team.write(first, question, {}), greedy(2), first, session=session, teach=False)
        engine.drain()
        for mode in (Mode.DENSE if number else Mode.OBSERVE, Mode.AUTO):
            engine.reset_prefix_cache()
            how: dict[str, Any] = {"session": session, "mode": mode, "teach": not number}
            answers[mode].append(ask(engine, team.write(second, question, {}), greedy(ANSWER), second, **how))
            engine.drain()
    return answers[Mode.DENSE], answers[Mode.AUTO][1:]


def judge_rounds(
    content: int, dense: Sequence[Answer], reuse: Sequence[Answer], harvest: dict[str, Any]
) -> Iterator[Measured]:
    """What a content of so many tokens loaded by a second agent gains and costs.

    Args:
        content: its tokens.
        dense, reuse: the second agent's answers.
        harvest: see ``bench.gpu.harvest_times``.
    """
    loaded, repaired = (int(median(getattr(a.report, name) for a in reuse)) for name in ("loaded", "repaired"))
    found = f"{loaded:,} loaded, {repaired:,} repaired"
    if not loaded:
        found += f": {reuse[-1].report.reason or 'no reason was given'}"
        yield Measured("tokens reused", State.BAD, found, "see docs/troubleshooting.md")
    elif not repaired:
        yield Measured("tokens reused", State.WEAK, found, "the repair pass did not run: see its line")
    else:
        yield Measured("tokens reused", State.GOOD, found)
    before, after = (median(a.ttft_ms for a in answers) for answers in (dense, reuse))
    yield _compared(
        f"first token, content of {content:,}, ms",
        before,
        after,
        f"{before / after:.1f} times sooner",
        "" if before > after * 1.2 else "reuse gains little here; try a longer content or a larger model",
    )
    held, longer = (median(harvest["held_ms"][mode.value]) for mode in (Mode.DENSE, Mode.OBSERVE))
    share = max(harvest["us_per_token"], 0.0) * content / 1e3 / before
    dear = "harvests take long: keep references on the device (reference_device) if it has room"
    yield _compared("harvest, ms", held, longer, f"{share:.1%} of the dense first token", dear if share > 0.1 else "")
    plain, speed = (median(a.tokens_per_s for a in answers) for answers in (dense, reuse))
    slower = "decoding is slower with reuse: measure again on an idle machine"
    change = speed / plain - 1 if plain else 0.0
    yield _compared("decoding, tokens/s", plain, speed, f"{change:+.0%}", slower if change < -0.15 else "")


def _compared(name: str, dense: float, reuse: float, found: str, remedy: str) -> Measured:
    """A line with two figures; weak where there is something to be done."""
    return Measured(name, State.WEAK if remedy else State.GOOD, found, remedy, f"{dense:,.1f}", f"{reuse:,.1f}")
