"""Finds known contents inside message texts.

A text is scanned once, however many contents are known. Every content is indexed under the ``GRAM`` substrings of
``GRAM`` characters that start in its first ``GRAM`` characters; an occurrence of it then holds one of them at a
position of the text that ``GRAM`` divides, so only those positions are looked up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvcomm_integrations.prompts.content import Content

GRAM = 16
MIN_CHARACTERS = 2 * GRAM
"""Shortest content searched for inside longer texts, characters."""
MIN_TOKENS = 16
"""Shortest content searched for inside longer texts, tokens."""
MIN_PART_CHARACTERS = 96
"""Shortest run of lines of an earlier message that counts as shared, characters."""
MAX_LINES = 64
"""Lines of one message under which its parts can be found."""
MAX_CHECKS = 100_000
"""Candidates compared in one search; repetitive text could make more of them, and loses the rest."""
MAX_ALIKE = 64
"""Messages that may share a line; of more, the newest are searched."""


class Match(NamedTuple):
    """``content`` stands at ``[start, end)`` of a text, characters."""

    start: int
    end: int
    content: Content


class Part(NamedTuple):
    """``[start, end)`` of a text also stands, line by line, in ``source``: not a content of its own yet."""

    start: int
    end: int
    source: Content


class ContentIndex:
    """The contents of one session, searchable by what they say. Not thread-safe: its owner locks."""

    def __init__(self) -> None:
        self._grams: dict[str, list[tuple[Content, int]]] = {}
        self._lines: dict[str, list[tuple[Content, int]]] = {}

    def add(self, content: Content, *, whole: bool, parts: bool) -> None:
        """Make ``content`` findable: as a ``whole``, by its ``parts`` (runs of lines), or both."""
        for key, offset in _gram_keys(content.core) if whole else ():
            self._grams.setdefault(key, []).append((content, offset))
        if parts:
            for key, offset in _line_keys(content.core):
                alike = self._lines.setdefault(key, [])
                alike.append((content, offset))
                del alike[:-MAX_ALIKE]

    def remove(self, content: Content) -> None:
        """Forget ``content``."""
        for table, keys in ((self._grams, _gram_keys(content.core)), (self._lines, _line_keys(content.core))):
            for key, _ in keys:
                kept = [entry for entry in table.get(key, ()) if entry[0] is not content]
                if kept:
                    table[key] = kept
                else:
                    table.pop(key, None)

    def find(self, text: str, start: int, end: int, accept: Callable[[Content], bool]) -> list[Match]:
        """Known contents in ``text[start:end]``: longest first, non-overlapping, every occurrence, in text order."""
        found: dict[tuple[int, int], Match] = {}
        checks = 0
        for at in range(start + (-start) % GRAM, end - GRAM + 1, GRAM) if self._grams else ():
            candidates = self._grams.get(text[at : at + GRAM], ())
            checks += len(candidates)
            if checks > MAX_CHECKS:
                break
            for content, offset in reversed(candidates):
                first = at - offset
                last = first + len(content.core)
                if (
                    start <= first
                    and last <= end
                    and (first, last) not in found
                    and text.startswith(content.core, first)
                    and not _cuts_word(text, first)
                    and not _cuts_word(text, last)
                    and accept(content)
                ):
                    found[first, last] = Match(first, last, content)
        return longest_first(found.values())

    def find_parts(self, text: str, start: int, end: int) -> list[Part]:
        """Runs of whole lines in ``text[start:end]`` that also stand in an earlier message, in text order."""
        parts: list[Part] = []
        at = start
        while self._lines and at < end:
            at = _skip_blank(text, at, end)
            best: Part | None = None
            for content, offset in self._lines.get(text[at : at + MIN_CHARACTERS], ()):
                length = _common_lines(text, at, end, content.core, offset)
                if length >= MIN_PART_CHARACTERS and (best is None or at + length > best.end):
                    best = Part(at, at + length, content)
            if best is not None:
                parts.append(best)
                at = best.end
            line_end = text.find("\n", at, end)
            at = end if line_end < 0 else line_end + 1
        return parts


def occurrences(text: str, start: int, end: int, content: Content) -> list[Match]:
    """Every occurrence of one content in ``text[start:end]``, of any length, not within a word."""
    matches: list[Match] = []
    at = text.find(content.core, start, end) if content.core else -1
    while at >= 0:
        last = at + len(content.core)
        if _cuts_word(text, at) or _cuts_word(text, last):
            last = at + 1
        else:
            matches.append(Match(at, last, content))
        at = text.find(content.core, last, end)
    return matches


def longest_first(matches: Iterable[Match], taken: Sequence[Match] = ()) -> list[Match]:
    """Non-overlapping matches in text order: all of ``taken``, then the longest of the others that still fit."""
    chosen = sorted(taken, key=lambda m: m.start)
    starts = [m.start for m in chosen]
    for match in sorted(matches, key=lambda m: (m.start - m.end, m.start)):
        place = bisect_left(starts, match.start)
        free_before = place == 0 or chosen[place - 1].end <= match.start
        if free_before and (place == len(starts) or match.end <= starts[place]):
            chosen.insert(place, match)
            starts.insert(place, match.start)
    return chosen


def gaps(start: int, end: int, matches: Sequence[Match]) -> list[tuple[int, int]]:
    """What ``matches`` (in text order) leave of ``[start, end)``."""
    edges = [start, *(edge for m in matches for edge in (m.start, m.end)), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def index_bytes(core: str, *, parts: bool) -> int:
    """About how much memory the index spends on a content, bytes."""
    lines = min(MAX_LINES, core.count("\n") + 1) if parts else 0
    return 300 * (GRAM + lines)


def _gram_keys(core: str) -> list[tuple[str, int]]:
    if len(core) < MIN_CHARACTERS:
        return []
    return [(core[i : i + GRAM], i) for i in range(GRAM)]


def _line_keys(core: str) -> list[tuple[str, int]]:
    keys: dict[str, int] = {}
    at = 0
    while at < len(core) and len(keys) < MAX_LINES:
        at = _skip_blank(core, at, len(core))
        if len(core) - at < MIN_PART_CHARACTERS:
            break
        keys.setdefault(core[at : at + MIN_CHARACTERS], at)
        at = core.find("\n", at) + 1 or len(core)
    return list(keys.items())


def _skip_blank(text: str, at: int, end: int) -> int:
    while at < end and text[at].isspace():
        at += 1
    return at


def _common_lines(text: str, at: int, end: int, other: str, offset: int) -> int:
    """Length of the longest common run of ``text[at:end]`` and ``other[offset:]`` that ends with a line of both."""
    low, high = 0, min(end - at, len(other) - offset)
    while low < high:
        middle = (low + high + 1) // 2
        if text[at + low : at + middle] == other[offset + low : offset + middle]:
            low = middle
        else:
            high = middle - 1
    run_end = at + low
    ends_line = run_end == end or text[run_end] == "\n"
    other_ends_line = offset + low == len(other) or other[offset + low] == "\n"
    if not (ends_line and other_ends_line):
        run_end = text.rfind("\n", at, run_end)
    return max(0, len(text[at:run_end].rstrip())) if run_end > at else 0


def _cuts_word(text: str, at: int) -> bool:
    """Whether position ``at`` lies within a word of an alphabetic script."""
    if not 0 < at < len(text):
        return False
    before, after = text[at - 1], text[at]
    return before.isalnum() and after.isalnum() and before < "\u2e80" and after < "\u2e80"
