"""How long does planning take? Times what happens to a prompt before the engine sees it; needs a tokenizer, no engine.

Each prompt pastes known contents into other agents' messages. ``first`` is the first prompt that holds them: the
session knows the contents, but no part of the prompt has been matched or tokenised before. ``next`` is what another
agent pays for the same conversation, with a system prompt and a last message of its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from kvcomm_integrations.bench.harness import progress, save_json, show
from kvcomm_integrations.bench.problems import generate_problems
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.langchain.messages import to_chat_messages
from kvcomm_integrations.prompts.builder import BuiltPrompt, PromptBuilder
from kvcomm_integrations.prompts.content_registry import ContentRegistry
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer

SIZES = (1_000, 2_000, 4_000)
"""Lengths of prompts, tokens."""
STAGES = ("conversion", "matching", "rendering", "tokens", "total")
"""What is timed: converting LangChain's messages, finding contents, the chat template, ids and segments, all of it."""
METHODS = {"_render": "rendering", "_turn_layouts": "matching", "_segmented_pieces": "tokens", "_number": "tokens"}
"""The prompt builder's methods that make up a stage."""
BUDGET_MS = 10.0
"""What planning a prompt of ``SIZES[-1]`` tokens may take with 200 known contents, milliseconds."""
SESSION = "bench"


class Stopwatch(dict[str, float]):
    """Milliseconds per stage of one prompt."""

    def time(self, stage: str, work: Callable[..., Any], *args: Any) -> Any:
        """Do some work and add the time it takes to a stage."""
        started = time.perf_counter()
        result = work(*args)
        self[stage] = self.get(stage, 0.0) + 1e3 * (time.perf_counter() - started)
        return result


class TimedBuilder(PromptBuilder):
    """A prompt builder that tells how long its stages took."""

    watch = Stopwatch()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for name, stage in METHODS.items():
            work = getattr(self, name)
            setattr(self, name, lambda *a, stage=stage, work=work: self.watch.time(stage, work, *a))


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


def measure(tokenizer: ChatTokenizer, *, tokens: int, contents: int, repeats: int) -> Planning:
    """Time planning of a prompt of about ``tokens`` tokens.

    Args:
        tokenizer, tokens: the model's, and the length of the prompt.
        contents: contents the session knows; the prompt holds as many of them as fit.
        repeats: times each prompt is planned, with new contents; the median counts.

    Raises:
        ConfigurationError: the contents are too few for so long a prompt.
    """
    texts = [problem.question for problem in generate_problems((contents + 2) * (repeats + 1))]
    batches = [texts[start : start + contents + 2] for start in range(0, len(texts), contents + 2)]
    count = _as_many_as_fit(tokenizer, batches.pop()[:contents], tokens)
    times: dict[str, list[Stopwatch]] = {"Ada": [], "Ben": []}
    for *known, one, other in batches:
        registry = ContentRegistry()
        for n, text in enumerate(known):
            registry.register(SESSION, f"agent:colleague-{n}:response", text)
        builder = TimedBuilder(tokenizer, registry)
        for agent, question in (("Ada", one), ("Ben", other)):
            built = _plan(builder, conversation(known[:count], agent, question), agent)
            times[agent].append(builder.watch)
    first, later = ({stage: median(ms[stage] for ms in found) for stage in STAGES} for found in times.values())
    return Planning(len(built.prompt.token_ids), len(built.placeholders), first, later)


def _as_many_as_fit(tokenizer: ChatTokenizer, known: Sequence[str], tokens: int) -> int:
    size = 0
    for count in range(1, len(known) + 1):
        chat = to_chat_messages(conversation(known[:count], "a", ""))
        size = len(tokenizer.encode(tokenizer.render([message.to_dict() for message in chat]), allow_special=True))
        if size >= tokens:
            return count
    raise ConfigurationError(f"{len(known)} contents make only {size} of {tokens} tokens; ask for more contents")


def _plan(builder: TimedBuilder, messages: Sequence[BaseMessage], agent: str) -> BuiltPrompt:
    watch = builder.watch = Stopwatch()

    def plan() -> BuiltPrompt:
        chat = watch.time("conversion", to_chat_messages, messages)
        built = builder.build(chat, session=SESSION, agent=agent)
        built.prompt.params(agent=agent, session=SESSION)
        return built

    built = watch.time("total", plan)
    watch["rendering"] -= watch["matching"]  # the builder looks for contents while it renders
    return built


def run_plan_cost(args: argparse.Namespace) -> int:
    """Run ``kvcomm bench planning``; returns the exit status.

    Raises:
        ConfigurationError: the contents are too few for so long a prompt.
    """
    tokenizer = ChatTokenizer.from_pretrained(args.model)
    results = []
    with progress("reading the tokenizer") as step:
        for tokens in args.tokens or SIZES:
            step(f"planning prompts of {tokens:,} tokens")
            results.append(measure(tokenizer, tokens=tokens, contents=args.contents, repeats=args.repeats))
    rows = (
        (f"{r.prompt_tokens:,}", str(r.placeholders), kind, *(f"{getattr(r, kind)[stage]:.2f}" for stage in STAGES))
        for r in results
        for kind in ("first", "next")
    )
    headings = ("prompt tokens", "placeholders", "prompt", *STAGES)
    show("Planning a prompt, milliseconds (medians)", headings, rows, left="prompt")
    print(
        "first: the first prompt that holds these contents. next: another agent's prompt over the "
        f"same conversation.\nThe aim is {BUDGET_MS:g} ms for {SIZES[-1]:,} tokens with 200 known contents."
    )
    save_json(args, [asdict(result) for result in results])
    return 0
