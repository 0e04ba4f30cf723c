"""One shared content and what identifies it. Pure data; no tokenizer, no sessions, no messages."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from kvcomm_integrations.prompts.messages import core_span


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
        start = 0
        if self.origin is Origin.GENERATED and "</think>" in self.text:
            start = self.text.rindex("</think>") + len("</think>")
        return core_span(self.text, start)


def content_id(token_ids: Sequence[int], *keys: str) -> str:
    """Hash of token ids and of whatever else must keep contents apart. Equal in every process and on every machine.

    Args:
        token_ids: the content's tokens.
        keys: further distinctions (model, LoRA adapter, tenant, name), order matters.
    """
    digest = hashlib.blake2b(digest_size=16)
    for key in keys:
        raw = key.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    digest.update(b"\0ids\0")
    packed = array("q", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    digest.update(packed.tobytes())
    return digest.hexdigest()


def response_name(agent: str) -> str:
    """Placeholder name of an agent's answers."""
    return f"agent:{agent}:response"
