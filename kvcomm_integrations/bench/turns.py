"""Does an agent's next turn cost more than its last? Conversations of many turns, dense and with reuse, in one engine.

Two scenarios, with real messages through the chat models. *loop*: a planner hands a plan to a worker, which calls a
tool turn after turn. *chat*: agents take turns, each reads what all others have said. Dense requests run with vLLM's
prefix caching, as without the connector. Both ways take their turns alternately, over questions of their own.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from kvcomm_integrations.bench.harness import Step, plot, progress, save_json, show
from kvcomm_integrations.bench.problems import generate_documents
from kvcomm_integrations.bench.roles import ROLES
from kvcomm_integrations.chat.request_log import RunRecord
from kvcomm_integrations.chat.runtime import runtime_for
from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.langchain import ChatKVComm
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import TREATMENTS, Mode

AGENTS = tuple(ROLES)
SCENARIOS = ("loop", "chat")
FIGURES = ("ttft_ms", "prompt_tokens", *TREATMENTS, "carried_estimate", "load_ms", "repair_ms")


@dataclass(frozen=True)
class Texts:
    """Made-up texts of given lengths, each different from its first token on.

    Args:
        tokenizer: the model's.
        question: tokens of a question.
        result: tokens of a tool's result.
    """

    tokenizer: ChatTokenizer
    question: int
    result: int

    def of(self, number: int, tokens: int) -> str:
        """A text of about so many tokens."""
        [text] = generate_documents(1, number, tokens, 2 * tokens)
        ids = self.tokenizer.encode_plain(f"Case {number}. {text}")[:tokens]
        return self.tokenizer.decode(ids).strip()


@dataclass
class Conversation:
    """One conversation, in one way.

    Args:
        engine: the engine.
        texts: where its texts come from.
        number: of the conversation; its question follows from it.
        mode: how its requests run.
        answer: tokens of every answer.
        client: ``langchain`` or ``autogen``: whose messages they are.
        policy: correction policy; ``None``: the engine's.
        tenant: whose it is.
        logprobs: likeliest tokens that are told at every position; 0: none.
    """

    engine: InProcessEngine
    texts: Texts
    number: int
    mode: Mode
    answer: int
    client: str = "langchain"
    policy: str | None = None
    tenant: str = "default"
    logprobs: int = 0
    said: list[tuple[str, AIMessage | str]] = field(default_factory=list)
    """Who has said what so far; a tool's results are its words."""

    def turn(self, scenario: str, number: int, agents: int) -> RunRecord:
        """The next turn; returns what became of its request."""
        if scenario == "chat":
            return self._speak(AGENTS[number % agents])
        if number == 0:
            return self._speak(AGENTS[0])
        if number > 1:
            result = self.texts.of(10_000_000 + 1000 * self.number + number, self.texts.result)
            self.said.append(("tool", f"Result of the tool: {result}"))
        return self._speak(AGENTS[1])

    def _speak(self, agent: str) -> RunRecord:
        speak = self._in_langchain if self.client == "langchain" else self._in_autogen
        self.said.append((agent, speak(agent)))
        return runtime_for(self.engine).runs.records()[-1]

    def _settings(self, agent: str) -> dict[str, Any]:
        settings = {
            "model": self.engine.config.model, "agent": agent, "session": f"{self.mode}-{self.number}",
            "mode": self.mode, "max_tokens": self.answer, "temperature": 0.0, "tenant": self.tenant,
        }  # fmt: skip
        settings |= {"logprobs": self.logprobs} if self.logprobs else {}
        return settings | ({"policy": self.policy} if self.policy else {})

    def _question(self) -> str:
        return self.texts.of(1 + self.number, self.texts.question)

    def _in_langchain(self, agent: str) -> AIMessage:
        messages: list[BaseMessage] = [SystemMessage(ROLES[agent]), HumanMessage(self._question())]
        for name, words in self.said:
            if isinstance(words, AIMessage):
                messages.append(words if name == agent else HumanMessage(words.content, name=name))
            else:
                messages.append(HumanMessage(words, name=name))
        return ChatKVComm(engine=self.engine, **self._settings(agent)).invoke(messages, min_tokens=self.answer)

    def _in_autogen(self, agent: str) -> str:
        from autogen_core import models as messages

        from kvcomm_integrations.autogen import KVCommChatCompletionClient

        history: list[Any] = [
            messages.SystemMessage(content=ROLES[agent]),
            messages.UserMessage(content=self._question(), source="user"),
        ]
        for name, words in self.said:
            kind = messages.AssistantMessage if name == agent else messages.UserMessage
            history.append(kind(content=str(words), source=name))
        client = KVCommChatCompletionClient(engine=self.engine, **self._settings(agent))
        return str(asyncio.run(client.create(history, extra_create_args={"min_tokens": self.answer})).content)


def compare(
    make: Callable[[int, Mode], Conversation], scenario: str, turns: int, agents: int, number: int
) -> list[dict[str, dict[str, float]]]:
    """One round: two conversations, dense and reuse by turns; returns the figures of each turn by way."""
    both = {mode: make(2 * number + place, mode) for place, mode in enumerate((Mode.DENSE, Mode.AUTO))}
    figures = []
    for turn in range(turns):
        order = list(both) if (turn + number) % 2 else list(both)[::-1]
        runs = {mode: both[mode].turn(scenario, turn, agents) for mode in order}
        figures.append(
            {mode.value: {name: float(getattr(runs[mode], name) or 0.0) for name in FIGURES} for mode in both}
        )
    return figures


def summary(rounds: Sequence[Sequence[dict[str, dict[str, float]]]]) -> list[dict[str, Any]]:
    """Medians of each turn, and the median of its ratios reuse / dense, which are taken within a round."""
    lines = []
    for turn, runs in enumerate(zip(*rounds, strict=True)):
        ways = {way: {name: median(run[way][name] for run in runs) for name in FIGURES} for way in ("dense", "auto")}
        ratios = sorted(run["auto"]["ttft_ms"] / max(run["dense"]["ttft_ms"], 1e-9) for run in runs)
        lines.append({"turn": turn, **ways, "ratio": median(ratios), "ratio_low": ratios[0], "ratio_high": ratios[-1]})
    return lines


@contextmanager
def learned(args: argparse.Namespace, runs: int) -> Iterator[tuple[Callable[[int, Mode], Conversation], Step]]:
    """An engine that has learned from some conversations: what makes further ones in it, and its progress.

    Args:
        args: the command line.
        runs: steps of the progress after learning.

    Raises:
        ConfigurationError: more agents than there are roles.
    """
    if args.agents > len(AGENTS):
        raise ConfigurationError(f"there are {len(AGENTS)} roles; {args.agents} agents are too many")
    answer = args.answer or (24 if args.scenario == "loop" else 96)
    longest = args.question + args.turns * (answer + args.result * (args.scenario == "loop") + 48) + 256
    config = EngineConfig(
        model=args.model,
        dtype=args.dtype,
        max_model_len=longest,
        block_size=args.block_size,
        seed=args.seed,
        reuse=ReuseConfig(idle_budget=0, carry=not args.no_carry),
    )
    with closing(InProcessEngine(config)) as engine, progress(total=args.warmup + runs) as step:
        texts = Texts(engine.tokenizer, args.question, args.result)

        def make(number: int, mode: Mode) -> Conversation:
            return Conversation(engine, texts, number, mode, answer, args.client, args.policy)

        for number in range(args.warmup):
            step(f"learning, conversation {number + 1}", done=1)
            taught = make(1000 + number, Mode.OBSERVE)
            for turn in range(min(args.turns, 2 * args.agents + 2)):
                taught.turn(args.scenario, turn, args.agents)
        yield make, step


def run_turns(args: argparse.Namespace) -> int:
    """Run ``kvcomm bench turns``; returns the exit status."""
    rounds = []
    with learned(args, args.rounds + 1) as (make, step):
        for number in range(args.rounds + 1):  # the first one warms up
            step(f"round {number}", done=1)
            rounds.append(compare(make, args.scenario, args.turns, args.agents, number))
            make(0, Mode.AUTO).engine.drain(timeout=120)
    lines = summary(rounds[1:])
    _show(lines, args)
    save_json(args, {"scenario": args.scenario, "turns": lines, "rounds": rounds[1:]})
    if args.plot:
        _plot(args, lines)
    return 0


def _show(lines: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    headings = ["turn", "prompt", "dense ms", "reuse ms", "ratio", "low", "high"]
    headings += ["exact", "carried", "estimate", "loaded", "repaired", "computed"]
    kinds = ("exact", "carried", "carried_estimate", "loaded", "repaired", "computed")
    rows = [
        (
            str(line["turn"]), f"{line['auto']['prompt_tokens']:.0f}",
            f"{line['dense']['ttft_ms']:.0f}", f"{line['auto']['ttft_ms']:.0f}",
            *(f"{line[name]:.2f}" for name in ("ratio", "ratio_low", "ratio_high")),
            *(f"{line['auto'][kind]:.0f}" for kind in kinds),
        )
        for line in lines
    ]  # fmt: skip
    show(
        f"{args.scenario}, {args.turns} turns, {args.rounds} rounds, {args.client}: medians", headings, rows, width=140
    )
    later = lines[1:]
    sums = {way: sum(line[way]["ttft_ms"] for line in later) for way in ("dense", "auto")}
    worst = max(later, key=lambda line: float(line["ratio"]))
    print(
        f"From turn 1 on: dense {sums['dense']:.0f} ms, reuse {sums['auto']:.0f} ms, "
        f"{sums['dense'] / sums['auto']:.2f} times less; worst turn {worst['turn']}: {worst['ratio']:.2f}. "
        "Turn 0 has nobody to load from."
    )


def _plot(args: argparse.Namespace, lines: Sequence[dict[str, Any]]) -> None:
    with plot(args.plot, 8) as axes:
        for way in ("dense", "auto"):
            axes.plot([line["turn"] for line in lines], [line[way]["ttft_ms"] for line in lines], marker="o", label=way)
        axes.set(xlabel="turn", ylabel="time to first token, ms", title=args.scenario)
        axes.legend()
