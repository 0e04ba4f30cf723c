"""Contents that one earlier prompt holds in a row are loaded as one run, the text between them included.

A *row* is the token sequence of a prompt and its answer; a *separator* is the fixed text between two contents of one
row. Every reference remembers a digest of the row before its content and of the row up to its end. Two contents of a
new prompt belong to one run if the digests say that they stood one after the other in the same row, with the same text
between them. The digest covers the whole row, so a conversation's later prompts, which begin with the earlier ones,
continue the same row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvcomm_integrations.ids import content_id
from kvcomm_integrations.planning.content_keys import ContentKey
from kvcomm_integrations.planning.entries import Entry
from kvcomm_integrations.planning.plan import Candidate
from kvcomm_integrations.planning.row import Row
from kvcomm_integrations.wire import Segment, SegmentKind

MAX_SEPARATOR = 64
"""Longest separator that is kept, tokens: longer template text belongs to one agent and is not worth its memory."""

Lookup = Callable[[ContentKey], Entry | None]


def separator_key(scope: str, after: str, ids: Sequence[int]) -> ContentKey:
    """Under which key the text before a content is held.

    Args:
        scope: who may share it: that of the contents.
        after: digest of the row up to the content that follows.
        ids: the text's token ids.
    """
    return ContentKey(scope, f"separator:{after}:{content_id(ids)}")


def separators_of(
    row: Row, contents: Iterable[tuple[Segment, Entry | None]], answer: int | None
) -> list[tuple[int, int]]:
    """The spans between contents that a row holds in a row, and between the last of them and the answer.

    Args:
        row: the row.
        contents: its contents in order, each with its entry; one that was taken from another row makes no separator.
        answer: where an answer begins that will be kept; ``None`` if none will.
    """
    spans = []
    held: Segment | None = None
    for segment, entry in contents:
        if held is not None and entry is not None and entry.reserved.before == row.at(segment.start):
            spans.append((held.end, segment.start))
        held = segment if entry is not None and entry.reserved.after == row.at(segment.end) else None
    if held is not None and answer is not None:
        spans.append((held.end, answer))
    return [(start, end) for start, end in spans if 0 < end - start <= MAX_SEPARATOR]


def join(
    found: Sequence[Candidate], ids: Sequence[int], scope: str, lookup: Lookup, depth: Callable[[Candidate, int], int]
) -> list[Candidate]:
    """The candidates, with contents of one row made one run: what lies between is loaded too, and only the run's
    beginning is repaired.

    Args:
        found: segments in order, covering the prompt.
        ids: the prompt's token ids.
        scope: whose separators may be found.
        lookup: the entry of a key.
        depth: first tokens to be repaired if a candidate is part of so many tokens that are loaded in one go. The most
            that any member of a run asks for is repaired.
    """
    joined = list(found)
    for run in _runs(_links(found, ids, scope, lookup)):
        first, last = run[0].first, run[-1].second
        tokens = found[last].segment.end - found[first].segment.start
        left = max(depth(found[place], tokens) for place in (first, *(link.second for link in run)))
        separators = {link.first + 1: link.separator for link in run}
        for place in range(first, last + 1):
            candidate = found[place]
            depth_here = min(left, candidate.segment.end - candidate.segment.start)
            left -= depth_here
            separator = separators.get(place)
            if candidate.segment.kind is SegmentKind.FIXED and separator is not None:
                edge = candidate.edge._replace(source=separator.source)
                why = "stands so in an earlier prompt"
                joined[place] = Candidate(candidate.segment, edge, separator, depth_here, why)
            elif depth_here != candidate.depth:
                joined[place] = replace(candidate, depth=depth_here)
    return joined


@dataclass(frozen=True)
class _Link:
    """Two neighbouring contents of a run, by their places in the list, and the separator if there is text between."""

    first: int
    second: int
    separator: Entry | None


def _runs(links: Iterable[_Link]) -> list[list[_Link]]:
    """Links that follow one another, together."""
    runs: list[list[_Link]] = []
    for link in links:
        if runs and runs[-1][-1].second == link.first:
            runs[-1].append(link)
        else:
            runs.append([link])
    return runs


def _links(found: Sequence[Candidate], ids: Sequence[int], scope: str, lookup: Lookup) -> list[_Link]:
    links = []
    for second, candidate in enumerate(found):
        between = second > 0 and found[second - 1].segment.kind is SegmentKind.FIXED
        first = second - 2 if between else second - 1
        if first >= 0 and _whole(candidate) and _whole(found[first]):
            link = _link(found, first, second, ids, scope, lookup)
            if link is not None:
                links.append(link)
    return links


def _link(
    found: Sequence[Candidate], first: int, second: int, ids: Sequence[int], scope: str, lookup: Lookup
) -> _Link | None:
    left, right = found[first], found[second]
    assert left.entry is not None and right.entry is not None
    before, after = right.entry.reserved.before, left.entry.reserved.after
    if not after or not before:
        return None
    if second == first + 1:
        return _Link(first, second, None) if after == before else None
    text = ids[left.segment.end : right.segment.start]
    if len(text) > MAX_SEPARATOR:
        return None
    separator = lookup(separator_key(scope, before, text))
    if separator is None or not separator.ready or separator.reserved.before != after:
        return None
    return _Link(first, second, separator)


def _whole(candidate: Candidate) -> bool:
    """The candidate loads a content from its first token to its last."""
    entry, segment = candidate.entry, candidate.segment
    return (
        segment.kind is SegmentKind.PLACEHOLDER
        and entry is not None
        and candidate.offset == 0
        and entry.reserved.length == segment.end - segment.start
    )
