"""Prompts of fully connected agents by token ids, for benchmarks that need every token under control.

Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcomm_integrations.bench.roles import ROLES
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import Segment, SegmentKind

AGENTS = tuple(ROLES)


@dataclass(frozen=True)
class Turn:
    """What an agent said, as token ids without the stop token."""

    agent: str
    content: tuple[int, ...]


class TeamPrompts:
    """Prompts made from a model's own chat template.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        marks = [{"role": "system", "content": "<1>"}, {"role": "user", "content": "<2>"}]
        text = tokenizer.render(marks)
        self._head, rest = text.split("<1>")
        self._middle, self._tail = rest.split("<2>")

    def write(self, agent: str, content: str, turns: Sequence[Turn]) -> SegmentedPrompt:
        """One agent's prompt: its role, the question, and what the others said."""
        ids: list[int] = []
        segments: list[Segment] = []

        def text(part: str, special: bool) -> None:
            ids.extend(self._tokenizer.encode(part, allow_special=special))

        def placeholder(name: str, part: Sequence[int]) -> None:
            if part:
                segments.append(
                    Segment(kind=SegmentKind.PLACEHOLDER, name=name, start=len(ids), end=len(ids) + len(part))
                )
                ids.extend(part)

        text(self._head + ROLES[agent] + self._middle, True)
        placeholder("user_question", self._tokenizer.encode(content, allow_special=False))
        for turn in turns:
            text(f"\n\nThe {turn.agent} says:\n", True)
            placeholder(f"agent:{turn.agent}:response", turn.content)
        text(self._tail, True)
        return SegmentedPrompt(tuple(ids), tuple(segments))
