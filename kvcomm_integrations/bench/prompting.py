"""Prompts of fully connected agents by token ids, for benchmarks that need every token under control.

``TeamPrompts`` are as long as their text; a ``PaperTeam`` has the papers' set-up: system prompts, questions and answers
of given lengths. All text is real: roles, reports made up by us, and answers that the model has given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcomm_integrations.bench.problems import generate_documents
from kvcomm_integrations.bench.roles import ROLES
from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import Segment, SegmentKind

AGENTS = tuple(ROLES)
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Turn:
    """What an agent said, as token ids without the stop token."""

    agent: str
    content: Ids


class _ChatPrompts:
    """Writes prompts with a model's own chat template, which is cut at the two messages."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        marks = [{"role": "system", "content": "<1>"}, {"role": "user", "content": "<2>"}]
        self._head, rest = tokenizer.render(marks).split("<1>")
        self._middle, self._tail = rest.split("<2>")

    def _write(self, start: Ids, question: Ids, answers: Mapping[str, Ids], fixed: bool) -> SegmentedPrompt:
        """``start``, the question and the answers; ``fixed``: ``start`` is a segment of its own."""
        ids = list(start)
        segments = [Segment(kind=SegmentKind.FIXED, start=0, end=len(ids))] if fixed else []

        def placeholder(name: str, part: Ids) -> None:
            if part:
                end = len(ids) + len(part)
                segments.append(Segment(kind=SegmentKind.PLACEHOLDER, name=name, start=len(ids), end=end))
                ids.extend(part)

        placeholder("user_question", question)
        for agent, answer in answers.items():
            ids.extend(self._tokenizer.encode_whole(f"\n\nThe {agent} says:\n"))
            placeholder(f"agent:{agent}:response", answer)
        ids.extend(self._tokenizer.encode_whole(self._tail))
        return SegmentedPrompt(tuple(ids), tuple(segments))


class TeamPrompts(_ChatPrompts):
    """Prompts made from a model's own chat template, as long as their text is."""

    def write(self, agent: str, content: str, turns: Sequence[Turn]) -> SegmentedPrompt:
        """One agent's prompt: its role, the question, and what the others said."""
        start = self._tokenizer.encode_whole(self._head + ROLES[agent] + self._middle)
        answers = {turn.agent: turn.content for turn in turns}
        return self._write(start, self._tokenizer.encode_plain(content), answers, fixed=False)


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens: of an agent's system prompt, of the question, of an answer."""

    prefix: int = 512
    input: int = 1024
    output: int = 512

    def __str__(self) -> str:
        return f"{self.prefix}/{self.input}/{self.output}"

    def longest(self, agents: int) -> int:
        """Most tokens of a prompt, and its answer, of a team of so many."""
        return self.prefix + self.input + agents * (self.output + 32)


class PaperTeam(_ChatPrompts):
    """Prompts of ``agents`` agents, each of which reads the question and all earlier answers.

    Args:
        tokenizer: the model's.
        agents: how many.
        sizes: lengths.
        seed: for the text.

    Raises:
        ConfigurationError: more agents than there are roles, or a system prompt that is too short for the template.
    """

    def __init__(self, tokenizer: ChatTokenizer, agents: int, sizes: Sizes, seed: int = 0) -> None:
        if agents > len(ROLES):
            raise ConfigurationError(f"there are {len(ROLES)} roles; {agents} agents are too many")
        super().__init__(tokenizer)
        self.names = AGENTS[:agents]
        self.sizes = sizes
        self._seed = seed
        guides = zip(self.names, _documents(agents, seed + 1, sizes.prefix), strict=True)
        self._prefixes = {name: self._prefix(f"{ROLES[name]}\n\nHouse rules:\n{guide}") for name, guide in guides}

    def question(self, number: int) -> Ids:
        """The question of a round, cut to its length."""
        size = self.sizes.input
        [text] = _documents(1, 1000 * (self._seed + 1) + number, size)
        return self._cut(text, size)

    def write(self, agent: str, question: Ids, answers: Mapping[str, Ids]) -> SegmentedPrompt:
        """An agent's prompt, given the answers it hears by the names of those who gave them."""
        return self._write(self._prefixes[agent], question, answers, fixed=True)

    def answering(self, agent: str, number: int, tokens: int | None = None) -> SamplingOptions:
        """How an agent's answer in a round is made: of exactly so many tokens (the team's own length if none are
        named), and drawn, since the likeliest words of a small model soon go round in circles, and then all agents
        give the same answer."""
        count, seed = tokens or self.sizes.output, 1000 * number + self.names.index(agent)
        return SamplingOptions(max_tokens=count, min_tokens=count, temperature=0.7, seed=seed, ignore_eos=True)

    def _prefix(self, text: str) -> Ids:
        head, middle = map(self._tokenizer.encode_whole, (self._head, self._middle))
        room = self.sizes.prefix - len(head) - len(middle)
        if room < 1:
            least = len(head) + len(middle) + 1
            raise ConfigurationError(f"a system prompt of {self.sizes.prefix} tokens is too short: {least} at least")
        return (*head, *self._cut(text, room), *middle)

    def _cut(self, text: str, size: int) -> Ids:
        ids = self._tokenizer.encode_plain(text)
        if len(ids) < size:
            raise ConfigurationError(f"a text of {len(ids)} tokens cannot be cut to {size}")
        return ids[:size]


def greedy(tokens: int) -> SamplingOptions:
    """So many tokens, the most likely each time, stop tokens included."""
    return SamplingOptions(max_tokens=tokens, temperature=0, ignore_eos=True)


def _documents(count: int, seed: int, tokens: int) -> list[str]:
    """Reports of at least so many tokens: their lengths are only known to within some per cent."""
    least = 50 + 6 * tokens // 5
    return generate_documents(count, seed, least, least)
