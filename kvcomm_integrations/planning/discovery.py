"""Shared contents of requests that say nothing of them: runs of tokens that earlier such requests had too.

Only requests without our parameters are looked at, among themselves and within their cache salt. What is found is
loaded like any named content; what is not found is kept for the next.
"""

from __future__ import annotations

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.planning.content_keys import content_scope
from kvcomm_integrations.planning.reference_index import ReferenceIndex
from kvcomm_integrations.planning.resolved_prompt import PlannedRequest
from kvcomm_integrations.wire import KVCommParams, Segment, SegmentKind

AGENT = "anyone"
NAME = "text"
"""Name of every content, found or new: all runs between unknown clients share one edge."""
LONGEST = 2048
"""Unknown text is kept in contents of at most so many tokens."""


def is_discoverable(request: PlannedRequest, config: ReuseConfig) -> bool:
    """Whether a request without our parameters is to be looked at."""
    least = config.discover_min_tokens
    return least is not None and request.prompt_token_ids is not None and request.num_prompt_tokens > least


def discover(request: PlannedRequest, config: ReuseConfig, index: ReferenceIndex) -> KVCommParams:
    """Parameters for a request that brought none, by what is held or reserved at present."""
    plain = KVCommParams(agent=AGENT, session=AGENT, response_name=NAME)
    scope = content_scope(request.cache_salt, plain, config.isolation)
    ids = request.prompt_token_ids or []
    least = config.discover_min_tokens or len(ids)
    segments: list[Segment] = []
    unknown = position = 0
    while position + least <= len(ids):
        length = index.longest_part(scope, ids, position)
        if length < least:
            position += 1
            continue
        segments += _cut(unknown, position)
        segments.append(_segment(position, position + length))
        unknown = position = position + length
    segments += _cut(unknown, len(ids))
    return plain.model_copy(update={"segments": tuple(segments)})


def _cut(start: int, end: int) -> list[Segment]:
    return [_segment(first, min(first + LONGEST, end)) for first in range(start, end, LONGEST)]


def _segment(start: int, end: int) -> Segment:
    return Segment(kind=SegmentKind.PLACEHOLDER, name=NAME, start=start, end=end)
