"""Which contents a request holds, and the keys under which others may find them: every key names tenant and session."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from kvcomm_integrations.config import Isolation, ReuseConfig
from kvcomm_integrations.connector.compat import Request
from kvcomm_integrations.ids import content_id
from kvcomm_integrations.planning.plan import cover
from kvcomm_integrations.planning.reference_index import ContentKey, Entry, EntryState, ReferenceIndex
from kvcomm_integrations.planning.request_state import RequestState
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.traits import policy_traits
from kvcomm_integrations.wire import KVCommParams, Segment, SegmentKind

AGENT = "anyone"
NAME = "text"
"""Name of every content, found or new: all runs between unknown clients share one edge."""
PIECE = 2048
"""Unknown text is kept in pieces of at most so many tokens."""


class Discovery:
    """Divides the prompts of unknown clients into segments.

    Args:
        config: whether to look at all, and from what length on a run counts.
        index: references that are held or promised.
    """

    def __init__(self, config: ReuseConfig, index: ReferenceIndex) -> None:
        self._config = config
        self._index = index

    def wanted(self, request: Request) -> bool:
        """Whether a request without our parameters is to be looked at."""
        least = self._config.discover_min_tokens
        return least is not None and request.prompt_token_ids is not None and request.num_prompt_tokens > least

    def params(self, request: Request) -> KVCommParams:
        """Parameters for a request that brought none, by what is held or promised at present."""
        plain = KVCommParams(agent=AGENT, session=AGENT, response_name=NAME)
        scope = content_scope(request, plain, self._config.isolation)
        ids = request.prompt_token_ids or []
        least = self._config.discover_min_tokens or len(ids)
        segments: list[Segment] = []
        unknown = position = 0
        while position + least <= len(ids):
            length = self._index.longest_part(scope, ids, position)
            if length < least:
                position += 1
                continue
            segments += _pieces(unknown, position)
            segments.append(_segment(position, position + length))
            unknown = position = position + length
        segments += _pieces(unknown, len(ids))
        return plain.model_copy(update={"segments": tuple(segments)})


def _pieces(start: int, end: int) -> list[Segment]:
    return [_segment(first, min(first + PIECE, end)) for first in range(start, end, PIECE)]


def _segment(start: int, end: int) -> Segment:
    return Segment(kind=SegmentKind.PLACEHOLDER, name=NAME, start=start, end=end)


@lru_cache(maxsize=4096)
def joined(*parts: str) -> str:
    """One string for names that clients choose, such that different names never give the same string."""
    return json.dumps(parts)


def content_scope(request: Request, params: KVCommParams, isolation: Isolation) -> str:
    """Who may load the contents of a request."""
    if isolation is Isolation.GLOBAL:
        return ""
    if isolation is Isolation.TENANT:
        return joined(request.cache_salt or "", params.tenant)
    return joined(request.cache_salt or "", params.tenant, params.session)


def names_session(scope: str, tenant: str, session: str) -> bool:
    """Whether a scope is that of a session, whatever its salt. No other kind of scope begins with a bracket."""
    return scope.startswith("[") and json.loads(scope)[1:] == [tenant, session]


FIRST_DENSE = "\0first dense"
"""In place of a consumer's name: the first who ran dense, where the very first did not."""


class Found(NamedTuple):
    """A reference for a segment, the segment's first token in it, and why it was chosen."""

    entry: Entry
    offset: int
    why: str


class Contents:
    """Segments of a request with their keys, entries and edges.

    Args:
        config: isolation, and the shortest content that is shared.
        index: references that are held or promised.
    """

    def __init__(self, config: ReuseConfig, index: ReferenceIndex) -> None:
        self.config = config
        self.index = index

    def ids(self, tracked: RequestState, segment: Segment) -> list[int]:
        """Token ids of a segment."""
        return (tracked.request.prompt_token_ids or [])[segment.start : segment.end]

    def key(self, tracked: RequestState, segment: Segment) -> ContentKey:
        """Under which key others may find a segment."""
        return ContentKey(tracked.scope, content_id(self.ids(tracked, segment)))

    def placeholders(self, tracked: RequestState) -> Iterable[Segment]:
        """Placeholders that are long enough to be shared."""
        for segment in tracked.params.segments:
            long_enough = segment.end - segment.start >= self.config.min_segment_tokens
            if segment.kind is SegmentKind.PLACEHOLDER and long_enough:
                yield segment

    def beginning(self, tracked: RequestState) -> Segment | None:
        """The fixed text at the very beginning, if it is long enough and not the whole prompt."""
        if not tracked.params.segments:
            return None
        first = tracked.params.segments[0]
        if first.start > 0:
            first = Segment(kind=SegmentKind.FIXED, start=0, end=first.start)
        long_enough = first.end >= self.config.min_segment_tokens
        alone = first.end >= tracked.prompt_tokens
        return first if first.kind is SegmentKind.FIXED and long_enough and not alone else None

    def beginning_key(self, tracked: RequestState, segment: Segment) -> ContentKey:
        """Key of an exact beginning, which tenants share among their sessions."""
        scope = "" if self.config.isolation is Isolation.GLOBAL else self.tenant_scope(tracked)
        return ContentKey(f"beginning|{scope}", content_id(self.ids(tracked, segment)))

    def fixed_key(self, tracked: RequestState, segment: Segment) -> ContentKey:
        """Key of template text, which belongs to one agent of a tenant."""
        scope = joined(tracked.request.cache_salt or "", tracked.params.tenant, tracked.params.agent)
        return ContentKey(f"fixed|{scope}", content_id(self.ids(tracked, segment)))

    def later_fixed(self, tracked: RequestState) -> list[tuple[Segment, str]]:
        """Template text after the beginning, with names that make its edges: by order in the prompt."""
        first = self.beginning(tracked)
        covered = cover(tracked.params.segments, tracked.prompt_tokens)
        fixed = [s for s in covered if s.kind is SegmentKind.FIXED and s != first]
        return [(segment, f"fixed:{number}") for number, segment in enumerate(fixed)]

    def find(self, tracked: RequestState, segment: Segment) -> tuple[Entry | None, int]:
        """The entry that holds a segment's content, ready or promised, and the content's first token in it."""
        ids = self.ids(tracked, segment)
        entry = self.index.lookup(ContentKey(tracked.scope, content_id(ids)))
        if entry is not None:
            return entry, 0
        return self.index.find_part(tracked.scope, ids) or (None, 0)

    def reference(self, tracked: RequestState, segment: Segment, policy: str) -> Found | None:
        """The reference to use for a segment, if one is ready.

        The producer's for answers, otherwise the first dense consumer's, or the first one's until there is one. Where
        chains are wanted, that of the agent that consumed the content just before, but only if that one ran dense:
        errors would add up otherwise.
        """
        entry, offset = self.find(tracked, segment)
        if entry is None or entry.state is not EntryState.READY:
            return None
        key = self.key(tracked, segment)
        first = Found(entry, offset, "producer" if entry.produced else "first consumer, reused itself in part")
        if not entry.produced:
            dense = entry if entry.dense else self._ready(key._replace(consumer=FIRST_DENSE))
            first = first if dense is None else Found(dense, offset if dense is entry else 0, "first dense consumer")
        if not self.chains(policy) or entry.last_consumer in ("", tracked.params.agent):
            return first
        if not entry.last_dense:
            return first._replace(why=f"{first.why}; the previous consumer was reused itself")
        link = self._ready(key._replace(consumer=entry.last_consumer))
        if link is not None:
            return Found(link, 0, "chain: previous consumer ran dense")
        if first.why == "first dense consumer" and first.entry.source == entry.last_consumer:
            return first._replace(why="chain: previous consumer ran dense")
        return first._replace(why=f"{first.why}; the previous consumer's reference is not held")

    def _ready(self, key: ContentKey) -> Entry | None:
        entry = self.index.lookup(key)
        return entry if entry is not None and entry.state is EntryState.READY else None

    def chains(self, policy: str) -> bool:
        """Whether references along the chain of agents are wanted."""
        traits = policy_traits(policy)
        return self.config.chain if self.config.chain is not None else traits is not None and traits.chains

    def edge(self, tracked: RequestState, entry: Entry, name: str) -> Edge:
        """Corrections are shared within a tenant, whatever the isolation of contents."""
        return Edge(entry.source, tracked.params.agent, name, self.tenant_scope(tracked))

    @staticmethod
    def tenant_scope(tracked: RequestState) -> str:
        """Who shares exact beginnings and learned corrections."""
        return joined(tracked.request.cache_salt or "", tracked.params.tenant)
