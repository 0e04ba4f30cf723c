"""Promising references before they are computed, and noting what can be learned from a dense prompt."""

from __future__ import annotations

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.planning.content_keys import FIRST_DENSE, Contents
from kvcomm_integrations.planning.contiguous import seam_key, seams_of
from kvcomm_integrations.planning.planner import Planner
from kvcomm_integrations.planning.reference_index import ContentKey, Entry, EntryState, ReferenceIndex
from kvcomm_integrations.planning.request_state import RequestState, TrainingExample
from kvcomm_integrations.reuse.traits import policy_traits
from kvcomm_integrations.wire import Mode


class Promises:
    """References that live requests are computing, announced so that nobody computes them twice.

    Args:
        index: references.
        contents: keys of a request's segments.
        planner: says which template text is worth keeping.
        config: our settings.
    """

    def __init__(self, index: ReferenceIndex, contents: Contents, planner: Planner, config: ReuseConfig) -> None:
        self.config = config
        self.index = index
        self.contents = contents
        self.planner = planner

    def promise_prompt(self, tracked: RequestState) -> None:
        """Announce the contents of an admitted prompt that nobody holds yet."""
        if tracked.refusal or tracked.params.mode is Mode.DENSE:
            return
        self._promise_beginning(tracked)
        policies = (tracked.policy, *tracked.params.audit)
        for segment in self.contents.placeholders(tracked):
            key = self.contents.key(tracked, segment)
            held = self.contents.find(tracked, segment)[0]
            if held is not None:
                consumer = self._also_held_for(tracked, key, held)
                if consumer is None:
                    continue
                key = key._replace(consumer=consumer)
            entry = self.index.promise(
                key,
                segment.end - segment.start,
                name=segment.name,
                source=tracked.params.agent,
                dense=not tracked.guard.active,
                owner=tracked.request.request_id,
                tenant=self.contents.tenant_scope(tracked),
                parts_of=self.contents.ids(tracked, segment),
                before=tracked.row.at(segment.start),
                after=tracked.row.at(segment.end),
            )
            if entry is not None:
                tracked.harvests.append((entry, segment.start, segment.end))
        if self.config.join_runs:
            self._promise_seams(tracked)
        if any(map(self.planner.loads_fixed, policies)):
            self._promise_fixed(tracked)

    def _also_held_for(self, tracked: RequestState, key: ContentKey, held: Entry) -> str | None:
        """As whose reference a dense prompt keeps a content that is held already; ``None``: as nobody's."""
        if tracked.guard.active or held.source == tracked.params.agent:
            return None
        if not held.dense and not held.produced and self.index.lookup(key._replace(consumer=FIRST_DENSE)) is None:
            return FIRST_DENSE
        chains = any(map(self.contents.chains, (tracked.policy, *tracked.params.audit)))
        return tracked.params.agent if chains else None

    def _promise_seams(self, tracked: RequestState) -> None:
        row, ids = tracked.row, tracked.request.prompt_token_ids or []
        contents = self.contents.placeholders(tracked)
        answer = tracked.prompt_tokens if tracked.params.response_name else None
        for start, end in seams_of(row, contents, lambda segment: self.contents.find(tracked, segment)[0], answer):
            entry = self.index.promise(
                seam_key(tracked.scope, row.at(end), ids[start:end]),
                end - start,
                name="",
                source=tracked.params.agent,
                dense=not tracked.guard.active,
                owner=tracked.request.request_id,
                tenant=self.contents.tenant_scope(tracked),
                before=row.at(start),
                after=row.at(end),
            )
            if entry is not None:
                tracked.harvests.append((entry, start, end))

    def note_consumer(self, tracked: RequestState) -> None:
        """Remember who has a prompt's contents before them now, for whoever comes next."""
        if tracked.refusal or tracked.params.mode is Mode.DENSE:
            return
        for segment in self.contents.placeholders(tracked):
            entry = self.contents.find(tracked, segment)[0]
            if entry is not None:
                entry.last_consumer, entry.last_dense = tracked.params.agent, not tracked.guard.active

    def _promise_fixed(self, tracked: RequestState) -> None:
        for segment, name in self.contents.later_fixed(tracked):
            entry = self.index.promise(
                self.contents.fixed_key(tracked, segment),
                segment.end - segment.start,
                name=name,
                source=tracked.params.agent,
                dense=not tracked.guard.active,
                owner=tracked.request.request_id,
                tenant=self.contents.tenant_scope(tracked),
            )
            if entry is not None:
                tracked.harvests.append((entry, segment.start, segment.end))

    def _promise_beginning(self, tracked: RequestState) -> None:
        """The fixed text before the first placeholder is the same in every prompt of an agent, position for position.

        The exact prefix cache keeps whole blocks only; this keeps the rest too.
        """
        segment = self.contents.beginning(tracked)
        if segment is None:
            return
        entry = self.index.promise(
            self.contents.beginning_key(tracked, segment),
            segment.end,
            name="",
            source=tracked.params.agent,
            dense=True,
            owner=tracked.request.request_id,
            tenant=self.contents.tenant_scope(tracked),
            exact=True,
        )
        if entry is not None:
            tracked.harvests.append((entry, 0, segment.end))

    def prepare_observes(self, tracked: RequestState) -> None:
        """Note what can be learned if the prompt is computed densely."""
        if tracked.guard.active or tracked.refusal or tracked.params.mode is Mode.DENSE:
            return
        if not tracked.params.teach:
            return
        for policy in dict.fromkeys((tracked.policy, *tracked.params.audit)):
            traits = policy_traits(policy)
            if traits is None or not traits.learns:
                continue
            for segment in self.contents.placeholders(tracked):
                found = self.contents.reference(tracked, segment, policy)
                if found is None:
                    continue
                entry, offset, _ = found
                edge = self.contents.edge(tracked, entry, segment.name)
                tokens = min(entry.tokens - offset, segment.end - segment.start)
                tracked.observes.append(TrainingExample(policy, edge, entry.ref_id, offset, segment.start, tokens))
            if self.planner.loads_fixed(policy):
                self._learn_fixed(tracked, policy)

    def _learn_fixed(self, tracked: RequestState, policy: str) -> None:
        for segment, name in self.contents.later_fixed(tracked):
            entry = self.index.lookup(self.contents.fixed_key(tracked, segment))
            if entry is not None and entry.state is EntryState.READY:
                edge = self.contents.edge(tracked, entry, name)
                tracked.observes.append(TrainingExample(policy, edge, entry.ref_id, 0, segment.start, entry.tokens))

    def break_promises(self, tracked: RequestState) -> None:
        """Withdraw what a request has promised and will not keep."""
        for entry, _, _ in tracked.harvests:
            self.index.withdraw(entry.ref_id)
        tracked.harvests = []
