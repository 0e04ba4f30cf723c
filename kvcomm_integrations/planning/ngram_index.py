"""Finds a content that is part of a held reference: an answer without its thinking or trimmed, a quoted question.

References are indexed by every window of a few token ids, within their scope. A hit is confirmed token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 8
"""Token ids per window; shorter contents are not found."""
LONGEST = 4096
"""References beyond this many tokens are not indexed."""

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Where a content lies in a reference: from token ``offset`` on."""

    ref_id: int
    offset: int


class NgramIndex:
    """Windows of the references that may hold other contents."""

    def __init__(self) -> None:
        self._ids: dict[int, tuple[str, Ids]] = {}
        self._windows: dict[tuple[str, Ids], Run] = {}

    def __len__(self) -> int:
        return len(self._windows)

    def add(self, ref_id: int, scope: str, ids: Sequence[int]) -> None:
        """Index a reference; of two equal windows the first one stays."""
        if not WINDOW <= len(ids) <= LONGEST:
            return
        whole = tuple(ids)
        self._ids[ref_id] = (scope, whole)
        for offset in range(len(whole) - WINDOW + 1):
            self._windows.setdefault((scope, whole[offset : offset + WINDOW]), Run(ref_id, offset))

    def remove(self, ref_id: int) -> None:
        """Forget a reference; unknown ones are ignored."""
        scope, whole = self._ids.pop(ref_id, ("", ()))
        for offset in range(len(whole) - WINDOW + 1):
            key = (scope, whole[offset : offset + WINDOW])
            found = self._windows.get(key)
            if found is not None and found.ref_id == ref_id:
                del self._windows[key]

    def longest(self, scope: str, ids: Sequence[int], start: int) -> int:
        """How many tokens from ``start`` on some reference holds in a row."""
        run = self._windows.get((scope, tuple(ids[start : start + WINDOW])))
        if run is None:
            return 0
        _, whole = self._ids[run.ref_id]
        held = len(whole) - run.offset
        return next(
            (n for n in range(WINDOW, min(held, len(ids) - start)) if whole[run.offset + n] != ids[start + n]),
            min(held, len(ids) - start),
        )

    def find(self, scope: str, ids: Sequence[int]) -> Run | None:
        """The reference that holds exactly these tokens in a row, if one does."""
        run = self._windows.get((scope, tuple(ids[:WINDOW])))
        if run is None:
            return None
        _, whole = self._ids[run.ref_id]
        return run if whole[run.offset : run.offset + len(ids)] == tuple(ids) else None
