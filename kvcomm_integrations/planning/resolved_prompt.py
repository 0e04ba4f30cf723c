"""A prompt, resolved once: every segment with its part in the prompt, its key and the name that makes its edge.

Everything here follows from the request alone, so it is made when the request arrives and handed forward, unchanged,
from lookup to plan to reservation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from kvcomm_integrations.config import Isolation, ReuseConfig
from kvcomm_integrations.ids import content_id
from kvcomm_integrations.planning.content_keys import ContentKey, content_scope, joined, tenant_scope
from kvcomm_integrations.planning.row import Row
from kvcomm_integrations.reuse.traits import PolicyTraits, policy_traits
from kvcomm_integrations.wire import KVCommParams, Segment, SegmentKind


class PlannedRequest(Protocol):
    """What planning needs to know of a request; vLLM's own ``Request`` has all of it."""

    @property
    def request_id(self) -> str:
        """Its name."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        """The prompt's tokens; ``None`` for a prompt of embeddings."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""

    @property
    def cache_salt(self) -> str | None:
        """Whose exact prefix cache it may hit."""


class Part(Enum):
    """What a segment is to the planner."""

    BEGINNING = auto()
    """Template text at the very beginning: the same in every prompt of an agent, position for position."""
    CONTENT = auto()
    """A placeholder that is long enough to be shared."""
    SHORT = auto()
    """A placeholder that is not."""
    TEMPLATE = auto()
    """Template text elsewhere."""


@dataclass(frozen=True)
class ResolvedSegment:
    """One of the segments that cover a prompt.

    Args:
        segment: its span, kind and placeholder name.
        part: what it is to the planner.
        key: under which its reference is held.
        name: what makes its edge: the placeholder's name, or ``fixed:<number>`` for template text.
    """

    segment: Segment
    part: Part
    key: ContentKey
    name: str

    @property
    def tokens(self) -> int:
        """Length."""
        return self.segment.end - self.segment.start


@dataclass(frozen=True, eq=False)
class ResolvedPrompt:
    """A request's prompt as planning sees it.

    Args:
        request_id: the request.
        params: what the request says of itself.
        token_ids: the prompt's tokens; empty for a prompt of embeddings.
        length: tokens of the prompt.
        scope: who may load its contents.
        tenant: who shares exact beginnings and learned corrections.
        policy: the policy it runs under.
        segments: in order, covering the prompt.
        row: digests of the prompt at the edges of its segments.
    """

    request_id: str
    params: KVCommParams
    token_ids: Sequence[int]
    length: int
    scope: str
    tenant: str
    policy: str
    segments: tuple[ResolvedSegment, ...]
    row: Row

    @property
    def agent(self) -> str:
        """Whose prompt it is."""
        return self.params.agent

    @property
    def lineage(self) -> tuple[str, str, str, str]:
        """What it has in common with the agent's other prompts in its session: tenant, session, agent, policy."""
        return (self.params.tenant, self.params.session, self.agent, self.policy)

    @property
    def policies(self) -> tuple[str, ...]:
        """The policy it runs under and those it is audited with."""
        return (self.policy, *self.params.audit)

    @property
    def traits(self) -> PolicyTraits | None:
        """Traits of the policy; ``None`` if it does not exist."""
        return policy_traits(self.policy)

    def ids(self, segment: Segment) -> Sequence[int]:
        """Token ids of a segment."""
        return self.token_ids[segment.start : segment.end]


def resolve(request: PlannedRequest, params: KVCommParams, config: ReuseConfig) -> ResolvedPrompt:
    """Work out everything about a prompt that planning needs and that does not change while the request waits."""
    token_ids = request.prompt_token_ids or ()
    scope = content_scope(request.cache_salt, params, config.isolation)
    tenant = tenant_scope(request.cache_salt, params)
    whole = "" if config.isolation is Isolation.GLOBAL else tenant
    agents_own = joined(request.cache_salt or "", params.tenant, params.agent)
    segments: list[ResolvedSegment] = []
    fixed = 0
    for segment in cover(params.segments, request.num_prompt_tokens):
        digest = content_id(token_ids[segment.start : segment.end])
        long_enough = segment.end - segment.start >= config.min_segment_tokens
        if segment.kind is SegmentKind.PLACEHOLDER:
            part = Part.CONTENT if long_enough else Part.SHORT
            resolved = ResolvedSegment(segment, part, ContentKey(scope, digest), segment.name)
        elif params.segments and segment.start == 0 and long_enough and segment.end < request.num_prompt_tokens:
            resolved = ResolvedSegment(segment, Part.BEGINNING, ContentKey(f"beginning|{whole}", digest), "")
        else:
            key = ContentKey(f"fixed|{agents_own}", digest)
            resolved = ResolvedSegment(segment, Part.TEMPLATE, key, f"fixed:{fixed}")
            fixed += 1
        segments.append(resolved)
    return ResolvedPrompt(
        request_id=request.request_id,
        params=params,
        token_ids=token_ids,
        length=request.num_prompt_tokens,
        scope=scope,
        tenant=tenant,
        policy=params.policy or config.policy,
        segments=tuple(segments),
        row=Row.of_prompt(token_ids, params.segments),
    )


def cover(segments: Sequence[Segment], prompt_tokens: int) -> list[Segment]:
    """The segments with every gap between them filled by a fixed segment, so that they cover the whole prompt."""
    covered: list[Segment] = []
    position = 0
    for segment in segments:
        if segment.start > position:
            covered.append(Segment(kind=SegmentKind.FIXED, start=position, end=segment.start))
        covered.append(segment)
        position = segment.end
    if position < prompt_tokens:
        covered.append(Segment(kind=SegmentKind.FIXED, start=position, end=prompt_tokens))
    return covered
