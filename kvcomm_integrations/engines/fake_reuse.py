"""What a real engine would have reused, worked out from the prompts seen so far. Keeps no KV, only token ids."""

from __future__ import annotations

from collections.abc import Sequence

from kvcomm_integrations.config import Isolation, ReuseConfig
from kvcomm_integrations.engines.interface import GenerationRequest
from kvcomm_integrations.wire import Mode, RequestReport, Segment, SegmentKind, SegmentReport

BLOCK = 16
"""Tokens per block of the pretended prefix cache."""


class FakeReuse:
    """Remembers prompts and contents, and reports every segment as exact, loaded, repaired or computed.

    Args:
        config: Isolation, repair depth and minimum length are honoured.
    """

    def __init__(self, config: ReuseConfig) -> None:
        self._config = config
        self._prompts: dict[str | None, list[tuple[int, ...]]] = {}
        self._contents: dict[tuple[str, tuple[int, ...]], str] = {}

    def report(self, request: GenerationRequest) -> RequestReport:
        """The report for a request; afterwards its prompt and contents are known."""
        ids, params = request.prompt.token_ids, request.params
        seen = self._prompts.setdefault(request.cache_salt, [])
        exact = max((_common(ids, other) for other in seen), default=0) // BLOCK * BLOCK
        exact = min(exact, len(ids) - 1)
        may_load = self._config.enabled and params.mode is Mode.AUTO
        last = request.prompt.segments[-1] if request.prompt.segments else None
        segments = tuple(
            self._segment(request, segment, exact, may_load and segment is not last)
            for segment in request.prompt.segments
        )
        seen.append(ids)
        if self._config.enabled and params.mode is not Mode.DENSE:
            for segment in request.prompt.segments:
                if segment.kind is SegmentKind.PLACEHOLDER:
                    self._contents.setdefault(self._key(request, segment), params.agent)
        if params.release and self._config.isolation is Isolation.SESSION:
            scope = self._scope(request)
            self._contents = {key: source for key, source in self._contents.items() if key[0] != scope}
        loaded = sum(segment.loaded for segment in segments)
        repaired = sum(segment.repaired for segment in segments)
        return RequestReport(
            agent=params.agent,
            session=params.session,
            mode=params.mode,
            policy=params.policy or self._config.policy,
            prompt_tokens=len(ids),
            exact=exact,
            loaded=loaded,
            repaired=repaired,
            computed=len(ids) - exact - loaded - repaired,
            reason="" if loaded else "nothing to load",
            segments=segments,
        )

    def _segment(self, request: GenerationRequest, segment: Segment, exact: int, may_load: bool) -> SegmentReport:
        size = segment.end - segment.start
        hit = min(max(exact - segment.start, 0), size)
        rest = size - hit
        source = self._contents.get(self._key(request, segment))
        known = segment.kind is SegmentKind.PLACEHOLDER and source is not None
        if not (may_load and known and rest and size >= self._config.min_segment_tokens):
            reason = "prefix cache" if not rest else "first seen" if source is None else "not reusable"
            return SegmentReport(**segment.model_dump(), exact=hit, computed=rest, reason=reason)
        repaired = min(self._config.repair_depth, rest // 2) if self._config.repair else 0
        return SegmentReport(
            **segment.model_dump(),
            exact=hit,
            loaded=rest - repaired,
            repaired=repaired,
            source=source or "",
            confidence=0.5,
            reason="reference",
        )

    def _key(self, request: GenerationRequest, segment: Segment) -> tuple[str, tuple[int, ...]]:
        return self._scope(request), tuple(request.prompt.token_ids[segment.start : segment.end])

    def _scope(self, request: GenerationRequest) -> str:
        params, isolation = request.params, self._config.isolation
        scope = "" if isolation is Isolation.GLOBAL else params.tenant
        if isolation is Isolation.SESSION:
            scope += "\0" + params.session
        return scope


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    size = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        size += 1
    return size
