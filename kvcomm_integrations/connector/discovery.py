"""Shared contents of requests that say nothing of them: runs of tokens that earlier such requests had too.

Only requests without our parameters are looked at, among themselves and within their cache salt. What is found is
loaded like any named content; what is not found is kept for the next.
"""

from __future__ import annotations

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.connector.compat import Request
from kvcomm_integrations.connector.contents import content_scope
from kvcomm_integrations.connector.index import ReferenceIndex
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
