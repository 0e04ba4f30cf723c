"""Writes jobs for the workers, from what was decided and the blocks it concerns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcomm_integrations.planning.jobs import AuditJob, AuditVariant, HarvestJob, LoadJob, LoadSpan, ObserveJob
from kvcomm_integrations.planning.plan import Candidate, Plan, Planned
from kvcomm_integrations.planning.reservations import Harvest, TrainingExample
from kvcomm_integrations.planning.resolved_prompt import ResolvedPrompt

Blocks = tuple[int, ...]


def load_job(prompt: ResolvedPrompt, planned: Planned, plan: Plan, blocks: Blocks) -> LoadJob:
    """Fill the external tokens of an admitted plan."""
    return LoadJob(
        prompt.request_id,
        blocks,
        planned.policy,
        load_spans(plan, planned.candidates),
        plan.gaps,
        tuple(prompt.token_ids[plan.exact : plan.end]),
        plan.exact,
        plan.end,
    )


def load_spans(plan: Plan, candidates: Sequence[Candidate]) -> tuple[LoadSpan, ...]:
    """Where in which references the loaded tokens of a plan come from."""
    spans = []
    for span in plan.spans:
        candidate = candidates[span.candidate]
        assert candidate.entry is not None
        offset = candidate.offset + span.start - candidate.segment.start
        spans.append(LoadSpan(candidate.entry.ref_id, offset, span.start, span.end, candidate.edge, span.exact))
    return tuple(spans)


def harvest_jobs(harvests: Iterable[Harvest], blocks: Blocks, check_ids: Sequence[int]) -> list[HarvestJob]:
    """Keep what a request has reserved.

    Args:
        harvests: what was reserved.
        blocks: the request's block table.
        check_ids: its prompt's token ids if the rotation is still to be verified on them; else empty.
    """
    return [
        HarvestJob(
            harvest.entry.ref_id,
            blocks,
            harvest.start,
            harvest.end,
            harvest.entry.reserved.name,
            harvest.entry.source,
            harvest.entry.key.scope,
            harvest.entry.reserved.dense,
            harvest.entry.reserved.exact,
            tuple(check_ids),
        )
        for harvest in harvests
    ]


def observe_jobs(examples: Iterable[TrainingExample], blocks: Blocks) -> list[ObserveJob]:
    """Learn from a prompt that was computed densely."""
    return [ObserveJob(e.policy, e.edge, e.ref_id, e.offset, blocks, e.start, e.tokens) for e in examples]


def audit_job(
    prompt: ResolvedPrompt, audits: Sequence[Planned], answer: Sequence[int], blocks: Blocks
) -> AuditJob | None:
    """Compare a finished dense request with the plans it might have had; ``None`` if there are none.

    Args:
        prompt: the request's prompt.
        audits: plans.
        answer: the answer's tokens, the last one included, which has no KV and is left out.
        blocks: the request's block table.
    """
    variants = tuple(
        AuditVariant(planned.policy, load_spans(planned.plan, planned.candidates), planned.plan.gaps, planned.plan.end)
        for planned in audits
        if planned.plan is not None
    )
    if not variants or audits[0].plan is None:
        return None
    ids = (*prompt.token_ids, *tuple(answer)[:-1][: prompt.params.audit_tokens])
    return AuditJob(prompt.request_id, blocks, ids, prompt.length, audits[0].plan.exact, variants)
