"""The scheduler half: decides, and holds no tensors.

Order of events for one request: ``new`` → ``match`` (once or more, until admitted) → ``allocated`` → ``step`` (every
step) → ``finished``. ``acknowledge`` brings the workers' answers. A plan only promises what every worker has
acknowledged.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvcomm_integrations.config import Isolation, ReuseConfig
from kvcomm_integrations.connector.compat import (
    KVCacheConfig,
    Request,
    RequestStatus,
    SchedulerOutput,
    VllmConfig,
    cache_bytes_per_token,
    hash_block_size,
    unsupported_reason,
)
from kvcomm_integrations.connector.edges import EdgeBook
from kvcomm_integrations.connector.index import ContentKey, Entry, EntryState, ReferenceIndex
from kvcomm_integrations.connector.isolation import HashGuard
from kvcomm_integrations.connector.metadata import (
    AuditJob,
    AuditVariant,
    HarvestJob,
    LoadJob,
    LoadSpan,
    ObserveJob,
    StepMetadata,
    WorkerReport,
)
from kvcomm_integrations.connector.plan import Candidate, Limits, Plan, cover, make_plan
from kvcomm_integrations.connector.tracking import Lesson, Tracked
from kvcomm_integrations.errors import WireError
from kvcomm_integrations.ids import content_id
from kvcomm_integrations.reuse.policies import policy_traits
from kvcomm_integrations.reuse.policies.base import Edge
from kvcomm_integrations.wire import WIRE_KEY, KVCommParams, Mode, Segment, SegmentKind

logger = logging.getLogger(__name__)

PREFILL_WAIT_S = 60.0
"""Longest wait for another request's prefill before a request goes ahead by itself, seconds."""


class SchedulerHalf:
    """Index, plans, promises and reports of one engine.

    Args:
        vllm_config: the engine's configuration.
        cache: vLLM's KV-cache configuration.
        config: our settings.
    """

    def __init__(self, vllm_config: VllmConfig, cache: KVCacheConfig, config: ReuseConfig) -> None:
        self.config = config
        self.block_size = int(cache.kv_cache_groups[0].kv_cache_spec.block_size) if cache.kv_cache_groups else 1
        self.disabled = "" if config.enabled else "reuse is switched off"
        refusal = unsupported_reason(vllm_config, cache)
        if refusal and config.enabled:
            self.disabled = refusal
            logger.error("KV reuse is off: %s. Requests are served densely.", refusal)
        self.verified = False
        self.repair_refusal: str | None = "the workers have not reported yet" if config.repair else "it is switched off"
        """Why there is no repair pass; ``None`` where it runs."""
        ranks = vllm_config.parallel_config.world_size
        self.index = ReferenceIndex(config.store_bytes, cache_bytes_per_token(cache), ranks)
        self.edges = EdgeBook(config)
        self._hash_block = hash_block_size(vllm_config, cache) if cache.kv_cache_groups else 1
        self._tracked: dict[str, Tracked] = {}
        self._others: dict[str, Request] = {}
        """Live requests without our parameters: they too may be computing blocks that others hit."""
        self._planned: list[Tracked] = []
        """Requests with a plan made in this step."""
        self._finished: list[tuple[str, list[HarvestJob], list[ObserveJob], list[AuditJob]]] = []
        """Requests whose blocks are kept until the workers have done these jobs."""
        self._repairing = 0
        """Tokens this step's repair pass holds already."""
        self._random = random.Random(0)
        self.block_ids: Callable[[str], tuple[int, ...]] = lambda req_id: ()
        """The block table of a live request; set once vLLM's cache manager is known."""

    # ---- arrival and admission -------------------------------------------------------------------------------------

    def new(self, request: Request) -> None:
        """A request has arrived."""
        try:
            params = KVCommParams.from_transfer_params(request.kv_transfer_params, request.num_prompt_tokens)
        except WireError as error:
            logger.warning("Request %s is served densely: %s", request.request_id, error)
            params = KVCommParams(mode=Mode.DENSE)
            self._track(request, params, refusal=str(error))
            return
        if params is None:
            self._others[request.request_id] = request
            return
        self._track(request, params, refusal=self._refusal(request, params))

    def match(self, request: Request, exact: int) -> int | None:
        """External tokens for a request about to be admitted, or ``None``: ask again next step.

        Args:
            request: vLLM's request.
            exact: tokens the prefix cache provides, a multiple of the block size.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0
        try:
            return self._match(tracked, exact)
        except Exception as error:  # a fault in planning costs the reuse of one request, nothing else
            logger.exception("Planning request %s failed; it is served densely", request.request_id)
            self._forget_plan(tracked)
            tracked.reason = tracked.refusal = f"planning failed ({type(error).__name__}: {error})"
            return 0

    def _match(self, tracked: Tracked, exact: int) -> int | None:
        started = time.perf_counter()
        tracked.exact = min(exact, tracked.prompt_tokens)
        tracked.reason = tracked.refusal
        tracked.audits = []
        self._notice_preemption(tracked)
        if tracked in self._planned:  # asked again within one step: the earlier answer does not count
            self._forget_plan(tracked)
        if tracked.guard.active:  # its plan was carried out before a preemption: the rest is computed, still kept apart
            tracked.reason = "preempted, then computed"
            tracked.exact = min(tracked.exact, tracked.guard.untouched)
            return 0
        if tracked.refusal or tracked.params.mode is Mode.DENSE:
            tracked.candidates = [Candidate(s) for s in cover(tracked.params.segments, tracked.prompt_tokens)]
            return 0
        if self._wants_promised(tracked, exact) and self._may_wait(tracked):
            return None
        if tracked.params.mode is Mode.OBSERVE:
            tracked.audits = self._audits(tracked, exact, tracked.params.audit)
            tracked.candidates = [Candidate(s) for s in cover(tracked.params.segments, tracked.prompt_tokens)]
            return 0
        tracked.candidates = self._candidates(tracked, tracked.policy)
        plan = make_plan(tracked.prompt_tokens, exact, tracked.candidates, self._limits())
        tracked.plan_ms = (time.perf_counter() - started) * 1e3
        if isinstance(plan, str):
            tracked.reason = plan
            return 0
        if tracked.dense_instead is None:
            tracked.dense_instead = self._dense_instead(tracked, plan)
        if tracked.dense_instead:
            tracked.reason = tracked.dense_instead
            tracked.audits = self._audits(tracked, exact, (tracked.policy,))
            return 0
        if self._repairing and self._repairing + plan.repaired > self.config.max_repair_tokens:
            return None
        if self._hits_unwritten(tracked.request, exact):
            return None
        tracked.plan = plan
        if plan.first_approximate is not None:
            tracked.guard.protect(plan.first_approximate)
        for span in plan.spans:
            entry = tracked.candidates[span.candidate].entry
            if entry is not None:
                self.index.touch(entry)
        self._planned.append(tracked)
        self._repairing += plan.repaired
        return plan.external

    def allocated(self, request: Request, blocks: Iterable[int], external: int) -> None:
        """vLLM has admitted a request and given it blocks."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if tracked.plan is not None and external != tracked.plan.external and tracked in self._planned:
            self._forget_plan(tracked)
            tracked.reason = "vLLM did not take the plan"
        tracked.blocks = tuple(blocks)
        if not tracked.admitted:
            tracked.admitted = True
            self._promise_prompt(tracked)
            self._prepare_observes(tracked)

    # ---- every step ------------------------------------------------------------------------------------------------

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """Orders for the workers in this step."""
        meta = StepMetadata()
        unadmitted: list[Tracked] = []
        for tracked in self._planned:
            if tracked.admitted and tracked.plan is not None:
                meta.loads.append(self._load_job(tracked, tracked.plan))
            elif tracked.plan is not None:
                unadmitted.append(tracked)
        for tracked in unadmitted:
            self._forget_plan(tracked)
        self._planned, self._repairing = [], 0
        for tracked in self._tracked.values():
            self._notice_preemption(tracked)
            if tracked.prompt_done and tracked.harvests:
                meta.harvests.extend(self._harvest_jobs(tracked, self.block_ids(tracked.request.request_id)))
            if tracked.prompt_done and tracked.observes and not tracked.audits:  # an audit comes before learning
                meta.observes.extend(self._observe_jobs(tracked, self.block_ids(tracked.request.request_id)))
        for req_id, tokens in output.num_scheduled_tokens.items():
            live = self._tracked.get(req_id)
            if live is not None and not live.prompt_done:
                # vLLM has not yet added this step's tokens to ``num_computed_tokens``.
                live.prompt_done = live.request.num_computed_tokens + tokens >= live.prompt_tokens
        for req_id, harvests, observes, audits in self._finished:
            meta.audits.extend(audits)
            meta.harvests.extend(harvests)
            meta.observes.extend(observes)
            meta.releases.append(req_id)
        self._finished = []
        # A reference may have been withdrawn while its harvest was due (a reset, a released session). Workers drop
        # before they harvest, so such a copy would stay for good.
        meta.harvests = [job for job in meta.harvests if self.index.by_id(job.ref_id) is not None]
        meta.drops = self.index.take_drops()
        return meta

    def acknowledge(self, report: WorkerReport) -> None:
        """Take in what the workers have done."""
        if report.disabled and not self.disabled:
            self.disabled = report.disabled
            self.index.clear()
            logger.error("KV reuse is off: %s. Requests are served densely.", report.disabled)
        self.verified = self.verified or report.verified
        if report.repair_known and self.config.repair:
            self.repair_refusal = report.repair_refusal
        if report.repair_known and report.repair_refusal:
            logger.warning("The repair pass is off: %s. Plans stop at the first unknown token.", report.repair_refusal)
        for ref_id, reason in report.failed.items():
            logger.warning("Reference %d was not stored: %s", ref_id, reason)
            self.index.withdraw(ref_id)
        for ref_id, ranks in report.stored.items():
            self.index.acknowledge(ref_id, ranks)
        for (policy, edge), examples in report.examples.items():
            self.edges.learned(policy, edge, examples)
        for (policy, edge, ref_id), leverage in report.leverage.items():
            entry = self.index.by_id(ref_id)
            if entry is not None:
                entry.leverage[(policy, edge)] = leverage
        for audit in report.audits:
            for edge in audit.edges:
                self.edges.audited(audit.policy, edge, audit.kl[0])
        for req_id, result in report.loads.items():
            live = self._tracked.get(req_id)
            if live is not None:
                live.result = result

    def finished(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended, well or not.

        Returns:
            whether its blocks must be kept until the next step's harvest is done, and the report for the client.
        """
        self._others.pop(request.request_id, None)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        self._notice_preemption(tracked)
        if tracked in self._planned:
            self._planned.remove(tracked)
        done = tracked.prompt_done and self._completed(tracked)
        harvests = self._harvest_jobs(tracked, tuple(blocks)) if done else []
        self._break_promises(tracked)
        harvests += self._response_harvest(tracked, tuple(blocks)) if done else []
        observes = self._observe_jobs(tracked, tuple(blocks)) if done else []
        audits = self._audit_jobs(tracked, tuple(blocks)) if done else []
        if harvests or observes or audits:
            self._finished.append((request.request_id, harvests, observes, audits))
        return bool(harvests or observes or audits), {WIRE_KEY: tracked.report().model_dump(mode="json")}

    def release_session(self, tenant: str, session: str) -> int:
        """Forget the references of a session; returns how many there were."""
        scopes = {entry.key.scope for entry in self.index.entries()}
        return sum(self.index.withdraw_scope(scope) for scope in scopes if _names_session(scope, tenant, session))

    def reset(self) -> None:
        """Forget all references, as the user asked. Learned corrections stay; start anew if weights change."""
        self.index.clear()

    # ---- deciding --------------------------------------------------------------------------------------------------

    def _refusal(self, request: Request, params: KVCommParams) -> str:
        if self.disabled:
            return self.disabled
        if request.lora_request is not None:
            return "LoRA requests are served densely"
        if request.mm_features or request.prompt_token_ids is None or request.prompt_embeds is not None:
            return "multimodal and embedding prompts are served densely"
        if request.resumable:
            return "streaming-input requests are served densely"
        if request.skip_reading_prefix_cache:
            return "the request asked to skip cached KV (prompt logprobs do)"
        for policy in (params.policy, *params.audit):
            if policy is not None and policy_traits(policy) is None:
                return f"policy {policy!r} does not exist"
        traits = policy_traits(params.policy or self.config.policy)
        if traits is not None and traits.needs_truth and params.mode is Mode.AUTO:
            return "this policy needs a dense run to choose what it recomputes; it can only be audited"
        return ""

    def _track(self, request: Request, params: KVCommParams, refusal: str) -> None:
        scope = _scope(request.cache_salt or "", params.tenant, params.session)
        if self.config.isolation is Isolation.TENANT:
            scope = _scope(request.cache_salt or "", params.tenant)
        elif self.config.isolation is Isolation.GLOBAL:
            scope = ""
        guard = HashGuard(request, self._hash_block)
        self._tracked[request.request_id] = Tracked(
            request, params, scope, params.policy or self.config.policy, guard, refusal
        )

    def _key(self, tracked: Tracked, segment: Segment) -> ContentKey:
        return ContentKey(tracked.scope, content_id(self._ids(tracked, segment)))

    def _ids(self, tracked: Tracked, segment: Segment) -> list[int]:
        return (tracked.request.prompt_token_ids or [])[segment.start : segment.end]

    def _beginning(self, tracked: Tracked) -> Segment | None:
        if not tracked.params.segments:
            return None
        first = tracked.params.segments[0]
        if first.start > 0:
            first = Segment(kind=SegmentKind.FIXED, start=0, end=first.start)
        long_enough = first.end >= self.config.min_segment_tokens
        alone = first.end >= tracked.prompt_tokens
        return first if first.kind is SegmentKind.FIXED and long_enough and not alone else None

    def _beginning_key(self, tracked: Tracked, segment: Segment) -> ContentKey:
        scope = "" if self.config.isolation is Isolation.GLOBAL else self._tenant_scope(tracked)
        return ContentKey(f"beginning|{scope}", content_id(self._ids(tracked, segment)))

    @staticmethod
    def _tenant_scope(tracked: Tracked) -> str:
        return _scope(tracked.request.cache_salt or "", tracked.params.tenant)

    def _find(self, tracked: Tracked, segment: Segment) -> tuple[Entry | None, int]:
        """The entry that holds a segment's content, ready or promised, and the content's first token in it."""
        ids = self._ids(tracked, segment)
        entry = self.index.lookup(ContentKey(tracked.scope, content_id(ids)))
        if entry is not None:
            return entry, 0
        return self.index.find_part(tracked.scope, ids) or (None, 0)

    def _edge(self, tracked: Tracked, entry: Entry, name: str) -> Edge:
        """Corrections are shared within a tenant, whatever the isolation of contents."""
        return Edge(entry.source, tracked.params.agent, name, self._tenant_scope(tracked))

    def _placeholders(self, tracked: Tracked) -> Iterable[Segment]:
        for segment in tracked.params.segments:
            long_enough = segment.end - segment.start >= self.config.min_segment_tokens
            if segment.kind is SegmentKind.PLACEHOLDER and long_enough:
                yield segment

    def _wants_promised(self, tracked: Tracked, exact: int) -> bool:
        """Another request is computing a content that this one could load."""
        return any(
            entry is not None and entry.state is EntryState.PROMISED and segment.end > exact
            for segment in self._placeholders(tracked)
            for entry, _ in (self._find(tracked, segment),)
        )

    def _may_wait(self, tracked: Tracked) -> bool:
        now = time.monotonic()
        tracked.first_wait = tracked.first_wait or now
        return now - tracked.first_wait < PREFILL_WAIT_S

    def _hits_unwritten(self, request: Request, exact: int) -> bool:
        """The exact hit ends in a block that another request is about to write in this very step.

        vLLM files blocks before they are computed; its own forward copes, but the repair pass runs before it.
        """
        last = exact // self._hash_block - 1
        if last < 0:
            return False
        wanted = request.block_hashes[last]
        others = [t.request for t in self._tracked.values()] + list(self._others.values())
        return any(
            other is not request
            and other.status == RequestStatus.RUNNING
            and other.num_computed_tokens < exact
            and last < len(other.block_hashes)
            and other.block_hashes[last] == wanted
            for other in others
        )

    def _candidates(self, tracked: Tracked, policy: str) -> list[Candidate]:
        return [self._candidate(tracked, s, policy) for s in cover(tracked.params.segments, tracked.prompt_tokens)]

    def _candidate(self, tracked: Tracked, segment: Segment, policy: str) -> Candidate:
        if segment.kind is SegmentKind.FIXED:
            return self._fixed_candidate(tracked, segment, policy)
        tokens = segment.end - segment.start
        if tokens < self.config.min_segment_tokens:
            return Candidate(segment, reason=f"shorter than {self.config.min_segment_tokens} tokens")
        entry, offset = self._find(tracked, segment)
        if entry is None or entry.state is not EntryState.READY:
            return Candidate(segment, reason="not seen before")
        if not self.verified:
            return Candidate(segment, reason="the rotation self-check has not run yet")
        edge = self._edge(tracked, entry, segment.name)
        traits = policy_traits(policy)
        # A policy that learns nothing repairs as deep as the engine's own would.
        judge = policy if traits is not None and traits.learns else self.config.policy
        decision = self.edges.decide(judge, edge, entry, tokens)
        examples = self.edges.examples(policy, edge)
        if not decision.load:
            return Candidate(segment, reason=decision.reason, examples=examples)
        depth = decision.repair_depth if traits is not None and traits.repairs else 0
        leverage = entry.leverage.get((policy, edge))
        confidence = None if leverage is None else max(0.0, min(1.0, 1.0 - leverage))
        return Candidate(segment, entry, depth, decision.reason, confidence, examples, offset)

    def _fixed_candidate(self, tracked: Tracked, segment: Segment, policy: str) -> Candidate:
        """Template text: copied exactly at the prompt's beginning; elsewhere repaired, or loaded if nothing repairs."""
        if segment == self._beginning(tracked):
            entry, reason = self.index.lookup(self._beginning_key(tracked, segment)), "exact copy"
        elif self._loads_fixed(policy):
            entry, reason = self.index.lookup(self._fixed_key(tracked, segment)), "mean of earlier runs"
        else:
            return Candidate(segment)
        if entry is None or entry.state is not EntryState.READY:
            return Candidate(segment)
        return Candidate(segment, entry, reason=reason)

    def _loads_fixed(self, policy: str) -> bool:
        """Without the repair pass, template text is loaded from the agent's own earlier runs."""
        traits = policy_traits(policy)
        return self.repair_refusal is not None or (traits is not None and not traits.repairs)

    def _fixed_key(self, tracked: Tracked, segment: Segment) -> ContentKey:
        scope = _scope(tracked.request.cache_salt or "", tracked.params.tenant, tracked.params.agent)
        return ContentKey(f"fixed|{scope}", content_id(self._ids(tracked, segment)))

    def _later_fixed(self, tracked: Tracked) -> list[tuple[Segment, str]]:
        """Template text after the beginning, with names that make its edges: by order in the prompt."""
        first = self._beginning(tracked)
        covered = cover(tracked.params.segments, tracked.prompt_tokens)
        fixed = [s for s in covered if s.kind is SegmentKind.FIXED and s != first]
        return [(segment, f"fixed:{number}") for number, segment in enumerate(fixed)]

    def _dense_instead(self, tracked: Tracked, plan: Plan) -> str:
        """Why a request that could reuse runs densely all the same: to audit its edges, or to teach young ones."""
        traits = policy_traits(tracked.policy)
        if plan.first_approximate is None:
            return ""
        if self._random.random() < self.config.audit_rate:
            return "audit"
        if traits is None or not traits.learns:
            return ""
        examples = [tracked.candidates[span.candidate].examples for span in plan.spans if not span.exact]
        if min(examples) < self.config.mature_examples and self._random.random() < self.config.learn_rate:
            return "learning"
        return ""

    def _audits(self, tracked: Tracked, exact: int, policies: Iterable[str]) -> list[tuple[str, Plan, list[Candidate]]]:
        """The plan of each policy for a prompt that is computed densely, to be compared with it afterwards."""
        audits: list[tuple[str, Plan, list[Candidate]]] = []
        if self.repair_refusal is not None:
            return audits
        for policy in policies:
            candidates = self._candidates(tracked, policy)
            plan = make_plan(tracked.prompt_tokens, exact, candidates, self._limits())
            if isinstance(plan, Plan) and plan.first_approximate is not None:
                audits.append((policy, plan, candidates))
        return audits

    def _limits(self) -> Limits:
        return Limits(self.repair_refusal is None, self.config.max_repair_share, self.config.max_repair_tokens)

    # ---- promises and jobs -----------------------------------------------------------------------------------------

    def _promise_prompt(self, tracked: Tracked) -> None:
        if tracked.refusal or tracked.params.mode is Mode.DENSE:
            return
        self._promise_beginning(tracked)
        for segment in self._placeholders(tracked):
            if self._find(tracked, segment)[0] is not None:
                continue
            entry = self.index.promise(
                self._key(tracked, segment),
                segment.end - segment.start,
                name=segment.name,
                source=tracked.params.agent,
                dense=not tracked.guard.active,
                owner=tracked.request.request_id,
            )
            if entry is not None:
                tracked.harvests.append((entry, segment.start, segment.end))
        if any(self._loads_fixed(policy) for policy in (tracked.policy, *tracked.params.audit)):
            self._promise_fixed(tracked)

    def _promise_fixed(self, tracked: Tracked) -> None:
        for segment, name in self._later_fixed(tracked):
            entry = self.index.promise(
                self._fixed_key(tracked, segment),
                segment.end - segment.start,
                name=name,
                source=tracked.params.agent,
                dense=not tracked.guard.active,
                owner=tracked.request.request_id,
            )
            if entry is not None:
                tracked.harvests.append((entry, segment.start, segment.end))

    def _promise_beginning(self, tracked: Tracked) -> None:
        """The fixed text before the first placeholder is the same in every prompt of an agent, position for position.

        The exact prefix cache keeps whole blocks only; this keeps the rest too.
        """
        segment = self._beginning(tracked)
        if segment is None:
            return
        entry = self.index.promise(
            self._beginning_key(tracked, segment),
            segment.end,
            name="",
            source=tracked.params.agent,
            dense=True,
            owner=tracked.request.request_id,
            exact=True,
        )
        if entry is not None:
            tracked.harvests.append((entry, 0, segment.end))

    def _prepare_observes(self, tracked: Tracked) -> None:
        if tracked.guard.active or tracked.refusal or tracked.params.mode is Mode.DENSE:
            return
        if not tracked.params.teach:
            return
        for policy in dict.fromkeys((tracked.policy, *tracked.params.audit)):
            traits = policy_traits(policy)
            if traits is None or not traits.learns:
                continue
            for segment in self._placeholders(tracked):
                entry, offset = self._find(tracked, segment)
                if entry is None or entry.state is not EntryState.READY:
                    continue
                edge = self._edge(tracked, entry, segment.name)
                tokens = min(entry.tokens - offset, segment.end - segment.start)
                tracked.observes.append(Lesson(policy, edge, entry.ref_id, offset, segment.start, tokens))
            if self._loads_fixed(policy):
                self._learn_fixed(tracked, policy)

    def _learn_fixed(self, tracked: Tracked, policy: str) -> None:
        for segment, name in self._later_fixed(tracked):
            entry = self.index.lookup(self._fixed_key(tracked, segment))
            if entry is not None and entry.state is EntryState.READY:
                edge = self._edge(tracked, entry, name)
                tracked.observes.append(Lesson(policy, edge, entry.ref_id, 0, segment.start, entry.tokens))

    def _observe_jobs(self, tracked: Tracked, blocks: tuple[int, ...]) -> list[ObserveJob]:
        jobs = [
            ObserveJob(lesson.policy, lesson.edge, lesson.ref_id, lesson.offset, blocks, lesson.start, lesson.tokens)
            for lesson in tracked.observes
            if self.index.by_id(lesson.ref_id) is not None
        ]
        tracked.observes = []
        return jobs

    def _load_spans(self, tracked: Tracked, plan: Plan, candidates: Sequence[Candidate]) -> tuple[LoadSpan, ...]:
        spans = []
        names = dict(self._later_fixed(tracked))
        for span in plan.spans:
            candidate = candidates[span.candidate]
            assert candidate.entry is not None
            name = candidate.segment.name or names.get(candidate.segment, "")
            edge = self._edge(tracked, candidate.entry, name)
            offset = candidate.offset + span.start - candidate.segment.start
            spans.append(LoadSpan(candidate.entry.ref_id, offset, span.start, span.end, edge, span.exact))
        return tuple(spans)

    def _audit_jobs(self, tracked: Tracked, blocks: tuple[int, ...]) -> list[AuditJob]:
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

    def _load_job(self, tracked: Tracked, plan: Plan) -> LoadJob:
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

    def _harvest_jobs(self, tracked: Tracked, blocks: tuple[int, ...]) -> list[HarvestJob]:
        check = () if self.verified else tuple(tracked.request.prompt_token_ids or ())
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

    def _response_harvest(self, tracked: Tracked, blocks: tuple[int, ...]) -> list[HarvestJob]:
        params, request = tracked.params, tracked.request
        if tracked.refusal or params.mode is Mode.DENSE or not params.response_name:
            return []
        ids = list(request.output_token_ids)
        ids = ids[:-1] if request.status == RequestStatus.FINISHED_STOPPED and ids else ids
        covered = min(len(ids), request.num_output_tokens - 1)
        if len(ids) < self.config.min_segment_tokens:
            return []
        key = ContentKey(tracked.scope, content_id(ids))
        entry = self.index.promise(
            key,
            covered,
            name=params.response_name,
            source=params.agent,
            dense=not tracked.guard.active,
            owner="",
            parts_of=ids[:covered],
        )
        if entry is None:
            return []
        start = tracked.prompt_tokens
        return [
            HarvestJob(
                entry.ref_id, blocks, start, start + covered, entry.name, entry.source, entry.key.scope, entry.dense
            )
        ]

    def _completed(self, tracked: Tracked) -> bool:
        return tracked.request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)

    def _break_promises(self, tracked: Tracked) -> None:
        for entry, _, _ in tracked.harvests:
            self.index.withdraw(entry.ref_id)
        tracked.harvests = []

    def _forget_plan(self, tracked: Tracked) -> None:
        """Undo a plan that vLLM has given no blocks for."""
        tracked.guard.restore()
        if tracked in self._planned:
            self._planned.remove(tracked)
            self._repairing -= tracked.plan.repaired if tracked.plan is not None else 0
        tracked.plan = None

    def _notice_preemption(self, tracked: Tracked) -> None:
        if tracked.request.num_preemptions == tracked.preemptions:
            return
        tracked.preemptions = tracked.request.num_preemptions
        self._break_promises(tracked)
        tracked.plan, tracked.result = None, None
        tracked.observes, tracked.audits = [], []
        tracked.admitted = False
        tracked.prompt_done = False


def _scope(*parts: str) -> str:
    """One string for names that clients choose, such that different names never give the same string."""
    return json.dumps(parts)


def _names_session(scope: str, tenant: str, session: str) -> bool:
    """Whether a scope is that of a session, whatever its salt. No other kind of scope begins with a bracket."""
    return scope.startswith("[") and json.loads(scope)[1:] == [tenant, session]
