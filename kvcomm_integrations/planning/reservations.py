"""What a prompt leaves behind once it is computed: references reserved for others, and examples for its edges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvcomm_integrations.ids import content_id
from kvcomm_integrations.planning.content_keys import FIRST_DENSE, ContentKey
from kvcomm_integrations.planning.contiguous import separator_key, separators_of
from kvcomm_integrations.planning.entries import Entry, Held, Holdings, Reservation
from kvcomm_integrations.planning.plan import Planned
from kvcomm_integrations.planning.planner import Planner
from kvcomm_integrations.planning.resolved_prompt import Part, ResolvedPrompt, ResolvedSegment
from kvcomm_integrations.planning.row import Row
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.traits import policy_traits
from kvcomm_integrations.wire import Mode, Segment, SegmentKind


@dataclass(frozen=True)
class Harvest:
    """A reserved reference is tokens ``[start, end)`` of the prompt and its answer."""

    entry: Entry
    start: int
    end: int


@dataclass(frozen=True)
class TrainingExample:
    """An edge could learn from tokens ``start`` on of the prompt, which are ``offset`` on of the reference."""

    policy: str
    edge: Edge
    ref_id: int
    offset: int
    start: int
    tokens: int


@dataclass(frozen=True)
class Contribution:
    """What a request leaves behind.

    Args:
        harvests: reserved references, to be copied in the step after the prompt is complete: harvesting then does not
            delay the first token.
        examples: what can be learned once the prompt is complete.
        audits: policies with the plans they would have made, to be compared once the request is over.
    """

    harvests: tuple[Harvest, ...] = ()
    examples: tuple[TrainingExample, ...] = ()
    audits: tuple[Planned, ...] = ()


class Reservations:
    """Reserves what live requests are computing, so that nobody computes it twice.

    Args:
        planner: plans over the same index.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._config = planner.config
        self._index = planner.index

    def reserve_prompt(self, prompt: ResolvedPrompt, held: Holdings, *, approximate: bool) -> Contribution:
        """Reserve the contents of an admitted prompt that nobody holds yet, and note what can be learned from it.

        Args:
            prompt: the prompt.
            held: what the index held for its segments just before.
            approximate: some of its KV is an estimate, so nothing can be learned from it.
        """
        if prompt.params.mode is Mode.DENSE:
            return Contribution()
        dense = not approximate
        harvests: list[Harvest] = []
        entries: list[tuple[Segment, Entry | None]] = []
        for segment, here in zip(prompt.segments, held, strict=True):
            if segment.part is Part.BEGINNING:  # the exact prefix cache keeps its whole blocks only
                harvests += self._reserve(prompt, segment, dense=True)
            elif segment.part is Part.CONTENT:
                entry, harvest = self._content(prompt, segment, here, dense=dense)
                entries.append((segment.segment, entry))
                harvests += harvest
        if self._config.join_runs:
            harvests += self._separators(prompt, entries, dense=dense)
        if any(map(self._planner.loads_fixed, prompt.policies)):
            for segment in prompt.segments:
                if segment.part is Part.TEMPLATE:
                    harvests += self._reserve(prompt, segment, dense=dense)
        examples = () if approximate or not prompt.params.teach else tuple(self._examples(prompt, held))
        for _, entry in entries:  # whoever comes next finds these contents in this agent's prompt
            if entry is not None:
                entry.last_consumer, entry.last_dense = prompt.agent, dense
        return Contribution(tuple(harvests), examples)

    def reserve_answer(
        self, prompt: ResolvedPrompt, answer: Sequence[int], computed: int, *, approximate: bool
    ) -> Harvest | None:
        """Reserve an answer that is complete.

        Args:
            prompt: the prompt.
            answer: the answer's token ids, without what ended it.
            computed: how many of them have KV: the last sampled token has none.
            approximate: some of the prompt's KV is an estimate.
        """
        params = prompt.params
        if params.mode is Mode.DENSE or not params.response_name or len(answer) < self._config.min_segment_tokens:
            return None
        row = [*prompt.token_ids, *answer]
        wanted = Reservation(
            key=ContentKey(prompt.scope, content_id(answer)),
            tokens=computed,
            name=params.response_name,
            source=params.agent,
            dense=not approximate,
            tenant=prompt.tenant,
            produced=True,
            length=len(answer),
            before=prompt.row.at(prompt.length),
            after=Row(row, [len(row)]).at(len(row)),
        )
        entry = self._index.reserve(wanted, answer[:computed])
        return None if entry is None else Harvest(entry, prompt.length, prompt.length + computed)

    def give_up(self, contribution: Contribution) -> Contribution:
        """Withdraw the reservations that a request will not keep; returns what is left."""
        for harvest in contribution.harvests:
            self._index.withdraw(harvest.entry.ref_id)
        return replace(contribution, harvests=())

    def _reserve(
        self, prompt: ResolvedPrompt, segment: ResolvedSegment, ids: Sequence[int] = (), *, dense: bool
    ) -> list[Harvest]:
        """Reserve a segment under its own key, ``ids`` searchable; no harvest if it is held already or cannot fit."""
        start, end = segment.segment.start, segment.segment.end
        wanted = Reservation(
            key=segment.key,
            tokens=segment.tokens,
            name=segment.name,
            source=prompt.agent,
            dense=dense,
            owner=prompt.request_id,
            tenant=prompt.tenant,
            exact=segment.part is Part.BEGINNING,
            length=segment.tokens,
            before=prompt.row.at(start),
            after=prompt.row.at(end),
        )
        entry = self._index.reserve(wanted, ids)
        return [] if entry is None else [Harvest(entry, start, end)]

    def _content(
        self, prompt: ResolvedPrompt, segment: ResolvedSegment, held: Held, *, dense: bool
    ) -> tuple[Entry | None, list[Harvest]]:
        """The entry that holds a content from now on, and the harvest that makes it if it is new."""
        ids = prompt.ids(segment.segment)
        entry = held.entry or self._index.find(segment.key, ids)[0]  # reserved by now if it stands in the prompt twice
        if entry is not None:
            consumer = self._also_held_for(prompt, segment, entry) if dense else None
            if consumer is None:
                return entry, []
            segment = replace(segment, key=segment.key._replace(consumer=consumer))
        harvests = self._reserve(prompt, segment, ids, dense=dense)
        return entry or next((harvest.entry for harvest in harvests), None), harvests

    def _also_held_for(self, prompt: ResolvedPrompt, segment: ResolvedSegment, entry: Entry) -> str | None:
        """As whose reference a dense prompt keeps a content that is held already; ``None``: as nobody's."""
        if entry.source == prompt.agent:
            return None
        reserved = entry.reserved
        first_dense = segment.key._replace(consumer=FIRST_DENSE)
        if not reserved.dense and not reserved.produced and self._index.lookup(first_dense) is None:
            return FIRST_DENSE
        return prompt.agent if any(map(self._planner.chains, prompt.policies)) else None

    def _separators(
        self, prompt: ResolvedPrompt, contents: Sequence[tuple[Segment, Entry | None]], *, dense: bool
    ) -> list[Harvest]:
        harvests = []
        answer = prompt.length if prompt.params.response_name else None
        for start, end in separators_of(prompt.row, contents, answer):
            key = separator_key(prompt.scope, prompt.row.at(end), prompt.token_ids[start:end])
            between = Segment(kind=SegmentKind.FIXED, start=start, end=end)
            harvests += self._reserve(prompt, ResolvedSegment(between, Part.TEMPLATE, key, ""), dense=dense)
        return harvests

    def _examples(self, prompt: ResolvedPrompt, held: Holdings) -> Iterable[TrainingExample]:
        """What can be learned if the prompt is computed densely."""
        for policy in dict.fromkeys(prompt.policies):
            traits = policy_traits(policy)
            if traits is None or not traits.learns:
                continue
            for segment, here in zip(prompt.segments, held, strict=True):
                start = segment.segment.start
                if segment.part is Part.CONTENT:
                    chosen = self._planner.choose(prompt, segment, here, policy)
                    if chosen is not None:
                        edge = self._planner.edge(prompt, segment, chosen.entry)
                        tokens = min(chosen.entry.tokens - chosen.offset, segment.tokens)
                        yield TrainingExample(policy, edge, chosen.entry.ref_id, chosen.offset, start, tokens)
                elif segment.part is Part.TEMPLATE and here.ready is not None and self._planner.loads_fixed(policy):
                    edge = self._planner.edge(prompt, segment, here.ready)
                    yield TrainingExample(policy, edge, here.ready.ref_id, 0, start, here.ready.tokens)
