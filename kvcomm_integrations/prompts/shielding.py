"""Keeps control tokens written in data apart from those the template writes.

Before rendering, every control token found in the data is *shielded*: moved, character by character, into a private
Unicode plane. Afterwards whatever stands there is known to be data, moved back, and its place remembered. Lengths do
not change, so positions found in the shielded text hold in the real one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvcomm_integrations.prompts.chat_message import deep_map

_PLANES = (0xF0000, 0x100000)


@dataclass(frozen=True)
class Shield:
    """Shields and unshields some words."""

    words: tuple[str, ...]
    """Longest first."""
    plane: int = _PLANES[0]
    """Where they are moved to: the first code point of a private plane."""

    @classmethod
    def for_data(cls, pattern: re.Pattern[str], data: Iterable[Any]) -> Shield | None:
        """A shield for JSON-like ``data``; ``None`` if no control token occurs in it, as is nearly always the case.

        Args:
            pattern: finds control tokens.
            data: everything a template may write that it does not say itself.
        """
        texts: list[str] = []
        for value in data:
            deep_map(value, lambda text: texts.append(text) or text)  # type: ignore[func-returns-value]
        words = tuple(sorted({found[0] for text in texts for found in pattern.finditer(text)}, key=len, reverse=True))
        if not words:
            return None
        candidates = [cls(words, plane) for plane in _PLANES]
        return next((c for c in candidates if not any(c._covered.search(text) for text in texts)), candidates[0])

    @cached_property
    def _plain(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.words)))

    @cached_property
    def _covered(self) -> re.Pattern[str]:
        return re.compile("|".join(self._moved(word, self.plane) for word in self.words))

    def cover(self, value: Any) -> Any:
        """JSON-like ``value`` with every control token shielded."""
        return deep_map(value, lambda text: self._plain.sub(lambda m: self._moved(m[0], self.plane), text))

    def uncover(self, text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
        """``text`` as it was meant, and the ``[start, end)`` of the control tokens that are data."""
        spans = tuple(found.span() for found in self._covered.finditer(text))
        return self._covered.sub(lambda m: self._moved(m[0], -self.plane), text), spans

    @staticmethod
    def _moved(text: str, by: int) -> str:
        return "".join(chr(ord(c) + by) for c in text)
