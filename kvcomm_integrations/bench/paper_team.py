"""The paper's set-up: fully connected agents with system prompts, questions and answers of given lengths in tokens.

All text is real: roles, reports made up by us, and answers that the model has given. Starts no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcomm_integrations.bench.problems import generate_documents
from kvcomm_integrations.bench.roles import ROLES
from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import Segment, SegmentKind

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens: of an agent's system prompt, of the question, of an answer."""

    prefix: int = 512
    input: int = 1024
    output: int = 512


class PaperTeam:
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
        self.names = tuple(ROLES)[:agents]
        self.sizes = sizes
        self._tokenizer = tokenizer
        self._seed = seed
        marks = [{"role": "system", "content": "<1>"}, {"role": "user", "content": "<2>"}]
        head, rest = tokenizer.render(marks).split("<1>")
        middle, tail = rest.split("<2>")
        self._middle, self._tail = self._template(middle), self._template(tail)
        guides = _documents(agents, seed + 1, sizes.prefix)
        self._prefixes = {
            name: self._prefix(self._template(head), f"{ROLES[name]}\n\nHouse rules:\n{guide}")
            for name, guide in zip(self.names, guides, strict=True)
        }

    def question(self, number: int) -> Ids:
        """The question of a round, cut to its length."""
        size = self.sizes.input
        [text] = _documents(1, 1000 * (self._seed + 1) + number, size)
        return self._cut(text, size)

    def write(self, agent: str, question: Ids, answers: Mapping[str, Ids]) -> SegmentedPrompt:
        """An agent's prompt, given the answers it hears by the names of those who gave them."""
        ids = list(self._prefixes[agent])
        segments = [Segment(kind=SegmentKind.FIXED, start=0, end=len(ids))]

        def placeholder(name: str, part: Ids) -> None:
            segments.append(Segment(kind=SegmentKind.PLACEHOLDER, name=name, start=len(ids), end=len(ids) + len(part)))
            ids.extend(part)

        placeholder("user_question", question)
        for name, answer in answers.items():
            ids.extend(self._template(f"\n\nThe {name} says:\n"))
            placeholder(f"agent:{name}:response", answer)
        ids.extend(self._tail)
        return SegmentedPrompt(tuple(ids), tuple(segments))

    def _prefix(self, head: Ids, text: str) -> Ids:
        room = self.sizes.prefix - len(head) - len(self._middle)
        if room < 1:
            least = len(head) + len(self._middle) + 1
            raise ConfigurationError(f"a system prompt of {self.sizes.prefix} tokens is too short: {least} at least")
        return (*head, *self._cut(text, room), *self._middle)

    def _cut(self, text: str, size: int) -> Ids:
        ids = tuple(self._tokenizer.encode(text, allow_special=False))
        if len(ids) < size:
            raise ConfigurationError(f"a text of {len(ids)} tokens cannot be cut to {size}")
        return ids[:size]

    def _template(self, text: str) -> Ids:
        return tuple(self._tokenizer.encode(text, allow_special=True))


def answering(tokens: int, seed: int) -> SamplingOptions:
    """How an answer of exactly so many tokens is made: drawn, since the likeliest words of a small model soon go round
    in circles, and then all agents give the same answer."""
    return SamplingOptions(max_tokens=tokens, min_tokens=tokens, temperature=0.7, seed=seed, ignore_eos=True)


def _documents(count: int, seed: int, tokens: int) -> list[str]:
    """Reports of at least so many tokens: their lengths are only known to within some per cent."""
    least = 50 + 6 * tokens // 5
    return generate_documents(count, seed, least, least)
