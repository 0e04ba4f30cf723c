"""Decides which parts of a message are shared contents, and makes new ones known."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence

from kvcomm_integrations.prompts.chat_message import SYSTEM_ROLES, ChatMessage, shared_name
from kvcomm_integrations.prompts.content import Content, Origin
from kvcomm_integrations.prompts.content_registry import ContentRegistry
from kvcomm_integrations.prompts.matching import (
    MIN_PART_CHARACTERS,
    MIN_TOKENS,
    Match,
    gaps,
    longest_first,
    occurrences,
)

Layout = Sequence[Match]
"""Where contents stand in a message's content, characters, in order."""

_PART = ":part"


class LayoutFinder:
    """Divides messages into shared contents and the rest, the same way each time a session sees the same message."""

    def __init__(self, registry: ContentRegistry, count: Callable[[str], int], min_tokens: int) -> None:
        """Args:
        registry: contents known so far.
        count: number of tokens of a text.
        min_tokens: shortest content that the caller named and that is searched for inside texts, tokens.
        """
        self._registry = registry
        self._count = count
        self._min_tokens = min_tokens

    def find(
        self,
        message: ChatMessage,
        session: str,
        agent: str,
        tool_names: Mapping[str, str],
        explicit: Sequence[Content] = (),
    ) -> Layout:
        """Where contents stand in a message.

        Args:
            message: any message.
            session: whose contents are looked for, and who gets to know new ones.
            agent: whose prompt it stands in.
            tool_names: tool-call id to tool name.
            explicit: contents the caller named: looked for before all others.
        """
        start, end = message.core()
        if start == end:
            return ()
        name = None if message.role in SYSTEM_ROLES else shared_name(message, agent, tool_names)
        key = _key(message, name, explicit)
        remembered = self._registry.layout(session, key)
        if remembered is not None:
            return remembered
        layout = self._divide(message, start, end, session, name, explicit)
        self._registry.remember_layout(session, key, layout)
        return layout

    def _divide(
        self, message: ChatMessage, start: int, end: int, session: str, name: str | None, explicit: Sequence[Content]
    ) -> Layout:
        text = message.content
        core = text[start:end]
        whole = self._known(session, core, message.segment_id, name, explicit)
        if whole is not None:
            return [Match(start, end, whole)]
        named = [
            m for c in explicit if self._count(c.core) >= self._min_tokens for m in occurrences(text, start, end, c)
        ]
        known = self._registry.search(session, text, start, end, lambda c: self._count(c.core) >= MIN_TOKENS)
        matches = longest_first(known, longest_first(named))
        if name is not None:
            matches = longest_first(self._shared_lines(session, text, gaps(start, end, matches)), matches)
            if not matches:
                return [Match(start, end, self._registry.register(session, name, core, origin=Origin.DISCOVERED))]
            if any(b - a >= MIN_PART_CHARACTERS for a, b in gaps(start, end, matches)):
                self._registry.register(session, name, core, origin=Origin.SOURCE)
        return matches

    def _known(
        self, session: str, core: str, segment_id: str | None, name: str | None, explicit: Sequence[Content]
    ) -> Content | None:
        """The content a message consists of: named by the caller, by its id, or by what it says."""
        for named in explicit:
            if named.core == core:
                return named
        content = self._registry.lookup(session, segment_id) if segment_id else None
        return content if content and content.core == core else self._registry.find_text(session, core, name)

    def _shared_lines(self, session: str, text: str, free: Sequence[tuple[int, int]]) -> list[Match]:
        """Runs of lines that an earlier message has too; each becomes a content of its own."""
        return [
            Match(part.start, part.end, self._part(session, part.source, text[part.start : part.end]))
            for start, end in free
            if end - start >= MIN_PART_CHARACTERS
            for part in self._registry.search_parts(session, text, start, end)
            if self._count(text[part.start : part.end]) >= MIN_TOKENS
        ]

    def _part(self, session: str, source: Content, text: str) -> Content:
        return self._registry.register(session, source.name.removesuffix(_PART) + _PART, text, origin=Origin.PART)


def _key(message: ChatMessage, name: str | None, explicit: Sequence[Content]) -> Hashable:
    digest = hashlib.blake2b(message.content.encode("utf-8"), digest_size=16).digest()
    return digest, name, message.segment_id, tuple(content.id for content in explicit)
