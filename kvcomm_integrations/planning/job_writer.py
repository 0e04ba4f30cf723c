"""Orders for the workers, made of what the scheduler half has decided. Each job names the blocks it works on."""

from __future__ import annotations

from collections.abc import Sequence

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.connector.compat import RequestStatus
from kvcomm_integrations.connector.metadata import AuditJob, AuditVariant, HarvestJob, LoadJob, LoadSpan, ObserveJob
from kvcomm_integrations.ids import content_id
from kvcomm_integrations.planning.content_keys import Contents
from kvcomm_integrations.planning.contiguous import Row
from kvcomm_integrations.planning.plan import Candidate, Plan
from kvcomm_integrations.planning.reference_index import ContentKey, ReferenceIndex
from kvcomm_integrations.planning.request_state import RequestState, WorkersState
from kvcomm_integrations.wire import Mode


class Jobs:
    """Writes orders.

    Args:
        config: our settings.
        index: references.
        contents: keys of a request's segments.
        workers: what the workers have reported of themselves.
    """

    def __init__(self, config: ReuseConfig, index: ReferenceIndex, contents: Contents, workers: WorkersState) -> None:
        self.config = config
        self.index = index
        self.contents = contents
        self.workers = workers

    def load(self, tracked: RequestState, plan: Plan) -> LoadJob:
        """Fill the external tokens of an admitted plan."""
        ids = tracked.request.prompt_token_ids or []
        return LoadJob(
            tracked.request.request_id,
            tracked.blocks,
            tracked.policy,
            self._load_spans(tracked, plan, tracked.candidates),
            plan.gaps,
            tuple(ids[plan.exact : plan.end]),
            plan.exact,
            plan.end,
        )

    def _load_spans(self, tracked: RequestState, plan: Plan, candidates: Sequence[Candidate]) -> tuple[LoadSpan, ...]:
        spans = []
        names = dict(self.contents.later_fixed(tracked))
        for span in plan.spans:
            candidate = candidates[span.candidate]
            assert candidate.entry is not None
            name = candidate.segment.name or names.get(candidate.segment, "")
            edge = self.contents.edge(tracked, candidate.entry, name)
            offset = candidate.offset + span.start - candidate.segment.start
            spans.append(LoadSpan(candidate.entry.ref_id, offset, span.start, span.end, edge, span.exact))
        return tuple(spans)

    def harvests(self, tracked: RequestState, blocks: tuple[int, ...]) -> list[HarvestJob]:
        """Keep what the request has promised; told once."""
        check = () if self.workers.verified else tuple(tracked.request.prompt_token_ids or ())
        jobs = [
            HarvestJob(
                entry.ref_id,
                blocks,
                start,
                end,
                entry.name,
                entry.source,
                entry.key.scope,
                entry.dense,
                entry.exact,
                check,
            )
            for entry, start, end in tracked.harvests
        ]
        tracked.harvests = []
        return jobs

    def answer(self, tracked: RequestState, blocks: tuple[int, ...]) -> list[HarvestJob]:
        """Keep the answer of a request that ended well, promising it at the same time."""
        params, request = tracked.params, tracked.request
        if tracked.refusal or tracked.outdated or params.mode is Mode.DENSE or not params.response_name:
            return []
        ids = list(request.output_token_ids)
        ids = ids[:-1] if request.status == RequestStatus.FINISHED_STOPPED and ids else ids
        covered = min(len(ids), request.num_output_tokens - 1)
        if len(ids) < self.config.min_segment_tokens:
            return []
        key = ContentKey(tracked.scope, content_id(ids))
        row = [*(request.prompt_token_ids or ()), *ids]
        entry = self.index.promise(
            key,
            covered,
            name=params.response_name,
            source=params.agent,
            dense=not tracked.guard.active,
            owner="",
            tenant=self.contents.tenant_scope(tracked),
            parts_of=ids[:covered],
            produced=True,
            before=tracked.row.at(tracked.prompt_tokens),
            after=Row(row, [len(row)]).at(len(row)),
            length=len(ids),
        )
        if entry is None:
            return []
        start = tracked.prompt_tokens
        return [
            HarvestJob(
                entry.ref_id, blocks, start, start + covered, entry.name, entry.source, entry.key.scope, entry.dense
            )
        ]

    def observes(self, tracked: RequestState, blocks: tuple[int, ...]) -> list[ObserveJob]:
        """Learn what was noted when the request was admitted; told once."""
        jobs = [
            ObserveJob(lesson.policy, lesson.edge, lesson.ref_id, lesson.offset, blocks, lesson.start, lesson.tokens)
            for lesson in tracked.observes
            if self.index.by_id(lesson.ref_id) is not None
        ]
        tracked.observes = []
        return jobs

    def audits(self, tracked: RequestState, blocks: tuple[int, ...]) -> list[AuditJob]:
        """Compare a finished dense request with the plans it might have had."""
        if not tracked.audits:
            return []
        variants = tuple(
            AuditVariant(policy, self._load_spans(tracked, plan, candidates), plan.gaps, plan.end)
            for policy, plan, candidates in tracked.audits
        )
        # The last sampled token has no KV; an audit goes over positions whose blocks are certainly there.
        answer = tuple(tracked.request.output_token_ids)[:-1][: tracked.params.audit_tokens]
        ids = (*(tracked.request.prompt_token_ids or ()), *answer)
        exact = tracked.audits[0][1].exact
        return [AuditJob(tracked.request.request_id, blocks, ids, tracked.prompt_tokens, exact, variants)]
