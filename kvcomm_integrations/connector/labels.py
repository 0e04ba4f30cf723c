"""Keeps the number of label values bounded, whatever names clients make up."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

WATCHED = 8
"""Names counted per name that may have a series of its own."""
CHANGES = 3
"""Times the whole set of own series may change over. After that it stays: old series never leave Prometheus."""


class TopLabels(Generic[T]):
    """The most used names, as far as they can be known in bounded memory (space-saving counts, Metwally et al. 2005).

    A name has a series of its own while fewer than ``limit`` have one, and later if it is used twice as much as the
    least used of them. Over time at most ``(1 + CHANGES) * limit`` series are made.

    Args:
        limit: names with series of their own at a time.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._own: set[T] = set()
        self._uses: dict[T, int] = {}
        self._changes_left = CHANGES * limit

    def use(self, name: T) -> bool:
        """Count a use of ``name``; whether it has a series of its own."""
        if self.limit == 0:
            return False
        self._count(name)
        if name in self._own:
            return True
        if len(self._own) >= self.limit:
            least = min(self._own, key=lambda own: self._uses.get(own, 0))
            if not self._changes_left or self._uses[name] <= 2 * self._uses.get(least, 0):
                return False
            self._own.remove(least)
            self._changes_left -= 1
        self._own.add(name)
        return True

    def _count(self, name: T) -> None:
        inherited = 0
        if name not in self._uses and len(self._uses) >= WATCHED * self.limit:
            others = (other for other in self._uses if other not in self._own)
            inherited = self._uses.pop(min(others, key=self._uses.__getitem__))
        self._uses[name] = self._uses.get(name, inherited) + 1
