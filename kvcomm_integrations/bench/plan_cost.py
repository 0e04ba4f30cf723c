"""How long does planning take? Times what happens to a prompt before the engine sees it; needs a tokenizer, no engine.

Each prompt pastes known contents into other agents' messages. ``first`` is the first prompt that holds them: the
session knows the contents, but no part of the prompt has been matched or tokenised before. ``next`` is what another
agent pays for the same conversation, with a system prompt and a last message of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from rich.console import Console
from rich.table import Table

from kvcomm_integrations.bench.problems import generate_problems
from kvcomm_integrations.errors import ConfigurationError, KVCommError
from kvcomm_integrations.langchain.messages import to_chat_messages
from kvcomm_integrations.prompts.builder import BuiltPrompt, PromptBuilder
from kvcomm_integrations.prompts.content_registry import ContentRegistry
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer

SIZES = (1_000, 2_000, 4_000)
"""Lengths of prompts, tokens."""
CONTENTS = 200
"""Contents the session knows."""
REPEATS = 20
"""Prompts per length, each with contents of its own."""
STAGES = ("conversion", "matching", "rendering", "tokens", "total")
"""What is timed: converting LangChain's messages, finding contents, the chat template, ids and segments, all of it."""
BUDGET_MS = 10.0
"""What planning a prompt of ``SIZES[-1]`` tokens may take, milliseconds."""
_SESSION = "bench"


@dataclass
class Stopwatch:
    """Milliseconds per stage of one prompt."""

    ms: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the time spent inside to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.ms[stage] = self.ms.get(stage, 0.0) + 1e3 * (time.perf_counter() - started)


class TimedBuilder(PromptBuilder):
    """A prompt builder that tells how long its stages took."""

    watch = Stopwatch()

    def _render(self, *args: Any) -> Any:
        with self.watch.time("rendering"):
            return super()._render(*args)

    def _turn_layouts(self, *args: Any) -> Any:
        with self.watch.time("matching"):
            return super()._turn_layouts(*args)

    def _segmented_pieces(self, *args: Any) -> Any:
        with self.watch.time("tokens"):
            return super()._segmented_pieces(*args)

    def _number(self, *args: Any) -> BuiltPrompt:
        with self.watch.time("tokens"):
            return super()._number(*args)


@dataclass(frozen=True)
class Planning:
    """What planning cost for one length of prompt, medians in milliseconds."""

    prompt_tokens: int
    placeholders: int
    first: Mapping[str, float]
    next: Mapping[str, float]


def conversation(contents: Sequence[str], agent: str, question: str) -> list[BaseMessage]:
    """What an agent of a team gets to read: others' answers, pasted into sentences."""
    heard = [HumanMessage(f"Colleague {n} says:\n{content}") for n, content in enumerate(contents)]
    return [SystemMessage(f"You are {agent}, one of a large team."), *heard, HumanMessage(question)]


def measure(tokenizer: ChatTokenizer, *, tokens: int, contents: int = CONTENTS, repeats: int = REPEATS) -> Planning:
    """Time planning of a prompt of about ``tokens`` tokens.

    Args:
        tokenizer: the model's.
        tokens: length of the prompt.
        contents: contents the session knows; the prompt holds as many of them as fit.
        repeats: times each prompt is planned, with new contents; the median counts.

    Raises:
        ConfigurationError: a number is below 1, or the contents are too few for so long a prompt.
    """
    for name, value in (("tokens", tokens), ("contents", contents), ("repeats", repeats)):
        if value < 1:
            raise ConfigurationError(f"{name} must be at least 1, got {value}")
    texts = [problem.question for problem in generate_problems((contents + 2) * (repeats + 1))]
    batches = [texts[start : start + contents + 2] for start in range(0, len(texts), contents + 2)]
    count = _as_many_as_fit(tokenizer, batches.pop()[:contents], tokens)
    first: list[Stopwatch] = []
    later: list[Stopwatch] = []
    for *known, one, other in batches:
        registry = ContentRegistry()
        for n, text in enumerate(known):
            registry.register(_SESSION, f"agent:colleague-{n}:response", text)
        builder = TimedBuilder(tokenizer, registry)
        for watches, agent, question in ((first, "Ada", one), (later, "Ben", other)):
            built, watch = _plan(builder, conversation(known[:count], agent, question), agent)
            watches.append(watch)
    return Planning(len(built.prompt.token_ids), len(built.placeholders), _medians(first), _medians(later))


def _as_many_as_fit(tokenizer: ChatTokenizer, known: Sequence[str], tokens: int) -> int:
    size = 0
    for count in range(1, len(known) + 1):
        chat = to_chat_messages(conversation(known[:count], "a", ""))
        size = len(tokenizer.encode(tokenizer.render([message.to_dict() for message in chat]), allow_special=True))
        if size >= tokens:
            return count
    raise ConfigurationError(f"{len(known)} contents make only {size} of {tokens} tokens; ask for more contents")


def _plan(builder: TimedBuilder, messages: Sequence[BaseMessage], agent: str) -> tuple[BuiltPrompt, Stopwatch]:
    watch = builder.watch = Stopwatch()
    with watch.time("total"):
        with watch.time("conversion"):
            chat = to_chat_messages(messages)
        built = builder.build(chat, session=_SESSION, agent=agent)
        built.prompt.params(agent=agent, session=_SESSION)
    watch.ms["rendering"] -= watch.ms["matching"]  # the builder looks for contents while it renders
    return built, watch


def _medians(watches: Sequence[Stopwatch]) -> dict[str, float]:
    return {stage: median(watch.ms[stage] for watch in watches) for stage in STAGES}


def show(results: Sequence[Planning], console: Console) -> None:
    """Print a line per prompt and kind."""
    table = Table(title="Planning a prompt, milliseconds (medians)")
    for heading in ("prompt tokens", "placeholders"):
        table.add_column(heading, justify="right")
    table.add_column("prompt")
    for stage in STAGES:
        table.add_column(stage, justify="right")
    for result in results:
        for kind, stages in (("first", result.first), ("next", result.next)):
            counts = (f"{result.prompt_tokens:,}", str(result.placeholders))
            table.add_row(*counts, kind, *(f"{stages[stage]:.2f}" for stage in STAGES))
    console.print(table)
    console.print(
        "first: the first prompt that holds these contents. next: another agent's prompt over the "
        f"same conversation.\nThe aim is {BUDGET_MS:g} ms for {SIZES[-1]:,} tokens with {CONTENTS} known contents."
    )


def run_planning(args: argparse.Namespace) -> int:
    """Run ``kvcomm bench planning``."""
    tokenizer = ChatTokenizer.from_pretrained(args.model or _demo_model())
    results = [
        measure(tokenizer, tokens=tokens, contents=args.contents, repeats=args.repeats)
        for tokens in args.tokens or SIZES
    ]
    console = Console(highlight=False)
    show(results, console if console.is_terminal else Console(highlight=False, width=120))
    if args.json:
        args.json.write_text(json.dumps([vars(result) for result in results], indent=1) + "\n", encoding="utf-8")
    return 0


def _demo_model() -> str:
    from kvcomm_integrations.demo_model import ensure_demo_model

    return str(ensure_demo_model(progress=sys.stderr.isatty()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark with ``argv`` and return the exit status; ``kvcomm bench planning`` takes the same options."""
    parser = argparse.ArgumentParser(prog="plan_cost", description="Times planning.")
    parser.add_argument("--model", help="folder or hub id of the model (default: SmolLM2-135M, prepared on first use)")
    parser.add_argument("--tokens", type=int, action="append", metavar="N", help="length of prompts; repeatable")
    parser.add_argument("--contents", type=int, default=CONTENTS, metavar="N", help="known contents (%(default)s)")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help="prompts per length (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    try:
        return run_planning(parser.parse_args(argv))
    except KVCommError as err:
        print(f"kvcomm: {err}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
