"""Keeps control tokens written in data apart from those the template writes. Knows texts only.

Before rendering, every control token found in the data is *shielded*: moved, character by character, into a private
Unicode plane. Afterwards whatever stands there is known to be data, moved back, and its place remembered. Lengths do
not change, so positions found in the shielded text hold in the real one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvcomm_integrations.prompts.messages import deep_map

_PLANES = (0xF0000, 0x100000)
_SHIELDABLE = 0xFFFE


@dataclass(frozen=True)
class Shield:
    """Shields and unshields the words one pattern finds."""

    pattern: re.Pattern[str]
    plane: int = _PLANES[0]

    @classmethod
    def for_data(cls, pattern: re.Pattern[str], data: Iterable[Any]) -> Shield | None:
        """A shield for JSON-like ``data``; ``None`` if no control token occurs in it, as is nearly always the case."""
        texts: list[str] = []
        for value in data:
            deep_map(value, lambda text: texts.append(text) or text)  # type: ignore[func-returns-value]
        if not any(pattern.search(text) for text in texts):
            return None
        for plane in _PLANES:
            if not any(plane <= ord(c) < plane + _SHIELDABLE for text in texts if not text.isascii() for c in text):
                return cls(pattern, plane)
        return cls(pattern)

    def cover(self, value: Any) -> Any:
        """JSON-like ``value`` with every control token shielded."""
        return deep_map(value, lambda text: self.pattern.sub(lambda m: self._moved(m[0], self.plane), text))

    def uncover(self, text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
        """``text`` as it was meant, and the ``[start, end)`` of the control tokens that are data."""
        covered = re.compile(f"[{chr(self.plane)}-{chr(self.plane + _SHIELDABLE - 1)}]+")
        spans: list[tuple[int, int]] = []

        def back(match: re.Match[str]) -> str:
            spans.append(match.span())
            return self._moved(match[0], -self.plane)

        return covered.sub(back, text), tuple(spans)

    @staticmethod
    def _moved(text: str, by: int) -> str:
        return "".join(chr(ord(c) + by) for c in text)
