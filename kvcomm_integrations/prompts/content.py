"""One shared content and what identifies it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from kvcomm_integrations.prompts.chat_message import core_span


class Origin(StrEnum):
    """How a content became known."""

    REGISTERED = "registered"
    """Named by the caller."""
    GENERATED = "generated"
    """An answer of an agent; its token ids are the generated ones."""
    DISCOVERED = "discovered"
    """A message seen in some agent's prompt."""
    PART = "part"
    """Lines that two messages have in common."""
    SOURCE = "source"
    """A message that holds other contents: only its lines are looked for, never the whole of it."""


@dataclass(frozen=True)
class Content:
    """A text that several prompts of a session may hold."""

    id: str
    """Also a message's ``segment_id``: tells name, text and token ids apart; equal in every process."""
    name: str
    """Placeholder name, such as ``user_question``."""
    text: str
    token_ids: tuple[int, ...] = ()
    """Generated ids, without the stop token; empty: the tokenizer's ids of the text."""
    origin: Origin = Origin.REGISTERED

    @cached_property
    def core(self) -> str:
        """The text without surrounding whitespace, and without thinking that precedes an answer."""
        start, end = self.core_span
        return self.text[start:end]

    @cached_property
    def core_span(self) -> tuple[int, int]:
        """Where ``core`` stands in ``text``, characters."""
        return core_span(self.text, thinking=self.origin is Origin.GENERATED)
