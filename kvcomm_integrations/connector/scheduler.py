"""The connector's side in vLLM's scheduler: when what is planned, promised to vLLM, ordered and reported.

Order of events for one request: ``on_new_request`` → ``get_num_new_matched_tokens`` (once or more, until admitted) →
``update_state_after_alloc`` → ``build_connector_meta`` (every step) → ``request_finished``.
``update_connector_output`` brings the workers' answers; ``note_loads`` brings them earlier to requests that end in the
very step they answer. What may be loaded is decided in ``planning``.
"""

from __future__ import annotations

import logging
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcomm_integrations.config import Isolation, ReuseConfig
from kvcomm_integrations.connector.block_hashes import HashGuard
from kvcomm_integrations.connector.circuit_breaker import CircuitBreaker
from kvcomm_integrations.connector.compat import (
    KVCacheConfig,
    Request,
    RequestStatus,
    SchedulerOutput,
    VllmConfig,
    cache_bytes_per_token,
    hash_block_size,
    request_refusal,
    unsupported_reason,
)
from kvcomm_integrations.connector.metadata import StepMetadata, WorkerReport
from kvcomm_integrations.connector.meter import ReuseMeter
from kvcomm_integrations.connector.shadows import FollowUp, Shadows
from kvcomm_integrations.connector.worker_reports import WorkerReports
from kvcomm_integrations.errors import WireError
from kvcomm_integrations.planning.content_keys import names_session
from kvcomm_integrations.planning.discovery import discover, is_discoverable
from kvcomm_integrations.planning.edge_table import EdgeTable
from kvcomm_integrations.planning.job_writer import audit_job, harvest_jobs, load_job, observe_jobs
from kvcomm_integrations.planning.jobs import AuditJob, HarvestJob, ObserveJob
from kvcomm_integrations.planning.lineages import Lineages
from kvcomm_integrations.planning.plan import Plan, Planned
from kvcomm_integrations.planning.planner import Planner
from kvcomm_integrations.planning.reference_index import ReferenceIndex
from kvcomm_integrations.planning.request_state import RequestState
from kvcomm_integrations.planning.reservations import Contribution, Reservations
from kvcomm_integrations.planning.resolved_prompt import Part, resolve
from kvcomm_integrations.planning.shadow_queue import ShadowTask
from kvcomm_integrations.planning.workers_state import WorkersState
from kvcomm_integrations.wire import WIRE_KEY, KVCommParams, Mode

logger = logging.getLogger(__name__)

PREFILL_WAIT_S = 60.0
"""Longest wait for another request's prefill before a request goes ahead by itself, seconds."""


@dataclass(kw_only=True)
class LiveRequest(RequestState):
    """A request's state, with vLLM's own object of it and the guard over its block hashes."""

    request: Request
    guard: HashGuard
    shadow: ShadowTask | None = None
    """What it computes again, if it is a request of ours."""


@dataclass(frozen=True)
class LastJobs:
    """What workers have to do with the blocks of a finished request before vLLM gets them back."""

    req_id: str
    harvests: list[HarvestJob]
    observes: list[ObserveJob]
    audits: list[AuditJob]

    def __bool__(self) -> bool:
        return bool(self.harvests or self.observes or self.audits)


class ConnectorScheduler:
    """Plans, reservations, orders and reports of one engine. Holds no tensors.

    Args:
        vllm_config: the engine's configuration.
        cache: vLLM's KV-cache configuration.
        config: our settings.
    """

    def __init__(self, vllm_config: VllmConfig, cache: KVCacheConfig, config: ReuseConfig) -> None:
        self.config = config
        self.block_size = int(cache.kv_cache_groups[0].kv_cache_spec.block_size) if cache.kv_cache_groups else 1
        disabled = "" if config.enabled else "reuse is switched off"
        refusal = unsupported_reason(vllm_config, cache)
        if refusal and config.enabled:
            disabled = refusal
            logger.error("KV reuse is off: %s. Requests are served densely.", refusal)
        if config.enabled and config.isolation is Isolation.GLOBAL:
            logger.warning(
                "Contents are shared by all tenants (isolation 'global'): by timing requests, anyone can find out "
                "what others have sent (compare CVE-2025-46570). Use it only where all clients may know all contents."
            )
        no_repair = "the workers have not reported yet" if config.repair else "it is switched off"
        self.workers = WorkersState(disabled, no_repair)
        ranks = vllm_config.parallel_config.world_size
        self.index = ReferenceIndex(config.store_bytes, cache_bytes_per_token(cache), ranks, config.tenant_share)
        self.breaker = CircuitBreaker(config.max_faults, config.fault_pause_s)
        self.edges = EdgeTable(config)
        self.planner = Planner(config, self.index, self.edges, self.workers)
        self.reservations = Reservations(self.planner)
        self.meter = ReuseMeter(config.metric_labels, self.planner, self.breaker)
        self._reports = WorkerReports(self.planner, self.breaker)
        self.lineages = Lineages()
        self.shadows = Shadows(config, self.index.withdraw)
        self.meter.waiting = self.shadows.queue.__len__
        self._hash_block = hash_block_size(vllm_config, cache) if cache.kv_cache_groups else 1
        self._live: dict[str, LiveRequest] = {}
        self._others: dict[str, Request] = {}
        """Live requests without our parameters: they too may be computing blocks that others hit."""
        self._planned: list[LiveRequest] = []
        """Requests with a plan made in this step."""
        self._finished: list[LastJobs] = []
        """Requests whose blocks are kept until the workers have done these jobs."""
        self._step = 0
        self._repairing = 0
        """Tokens this step's repair pass holds already."""
        self.block_ids: Callable[[str], tuple[int, ...]] = lambda req_id: ()
        """The block table of a live request; set once vLLM's cache manager is known."""
        self.cached_blocks: Callable[[Sequence[Any]], int] = lambda hashes: 0
        """How many blocks of these hashes, from the first on, the prefix cache holds; set likewise."""

    # ---- arrival and admission -------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """A request has arrived."""
        shadow = self.shadows.task_of(request.request_id)
        waited = 0.0
        if shadow is None:
            if self.shadows.busy:
                waited = max(0.0, time.time() - request.arrival_time)
                self.meter.delayed(waited)
            self.shadows.give_way()
        try:
            self._take_in(request, shadow)
        except Exception as error:  # costs the reuse of one request, nothing else
            logger.exception("Request %s could not be taken in; it is served densely", request.request_id)
            self.breaker.fault("plan", str(error))
            self._others[request.request_id] = request
        if shadow is not None:
            self.shadows.arrives()
        elif request.request_id in self._live:
            self._live[request.request_id].delayed_ms = 1e3 * waited

    def _take_in(self, request: Request, shadow: ShadowTask | None = None) -> None:
        refusal, discovered = "", False
        try:
            params = KVCommParams.from_transfer_params(request.kv_transfer_params, request.num_prompt_tokens)
        except WireError as error:
            logger.warning("Request %s is served densely: %s", request.request_id, error)
            self.meter.refused()
            params, refusal = KVCommParams(mode=Mode.DENSE), str(error)
        if params is None and is_discoverable(request, self.config):
            params, discovered = discover(request, self.config, self.index), True
        if params is None:
            self._others[request.request_id] = request
            return
        prompt = resolve(request, params, self.config)
        self.index.scopes.enter(prompt.scope, self.index.clock())
        live = self._live[request.request_id] = LiveRequest(
            prompt,
            self.planner.dense(prompt),
            refusal or self.workers.disabled or request_refusal(request) or self.planner.refusal(prompt),
            discovered,
            request=request,
            guard=HashGuard(request, self._hash_block, self.lineages.of(prompt)),
            shadow=shadow,
        )
        self._take_over(live)

    def _take_over(self, live: LiveRequest) -> bool:
        """Have vLLM look for the agent's own past if it reaches further than what is exact.

        Returns:
            whether what vLLM would find now has changed.
        """
        settled = live.guard.active or live.alone or live.preemptions or self._hash_block != self.block_size
        if settled or live.refusal or live.prompt.params.mode is not Mode.AUTO or not self.config.carry:
            return False
        return live.guard.take_over(self.cached_blocks)

    def _leave_past(self, live: LiveRequest) -> bool:
        """The request does without the agent's own past, for good.

        Returns:
            whether vLLM has looked for it and must look again.
        """
        live.alone, live.approximate, inherited = True, False, live.guard.inherited
        live.guard.disown()
        return inherited

    def get_num_new_matched_tokens(self, request: Request, exact: int) -> int | None:
        """External tokens for a request about to be admitted, or ``None``: ask again next step.

        Args:
            request: vLLM's request.
            exact: tokens the prefix cache provides, a multiple of the block size.
        """
        live = self._live.get(request.request_id)
        if live is None:
            return 0
        try:
            external = self._match(live, exact)
            self.breaker.success("plan")
            return external
        except Exception as error:  # a fault in planning costs the reuse of one request, nothing else
            logger.exception("Planning request %s failed; it is served densely", request.request_id)
            hidden = live.guard.inherited or (live.guard.active and live.preemptions > 0)  # it may have found estimates
            self._forget_plan(live)
            self._leave_past(live)
            live.carried = live.carried_estimate = 0
            live.reason = live.refusal = f"planning failed ({type(error).__name__})"
            self.breaker.fault("plan", str(error))
            return None if hidden else 0

    def _match(self, live: LiveRequest, exact: int) -> int | None:
        started = time.perf_counter()
        self._notice_preemption(live)
        if live in self._planned:  # asked again within one step: the earlier answer does not count
            self._forget_plan(live)
        live.exact = min(exact, live.prompt.length)
        live.carried = live.carried_estimate = 0
        live.settled = self.lineages.settled(live.guard.exact_hashes[: exact // self._hash_block]) * self._hash_block
        live.refusal = live.refusal or self.breaker.refusal()
        live.reason = live.refusal
        live.contribution = replace(live.contribution, audits=())
        if live.guard.active and live.preemptions:  # its plan was carried out: the rest is computed, still kept apart
            if live.guard.forgotten:
                self._leave_past(live)
                return None
            live.reason = "preempted, then computed"
            self._note_carried(live)
            live.held = self.planner.look_up(live.prompt)
            return 0
        if live.refusal or live.prompt.params.mode is Mode.DENSE:
            return None if self._leave_past(live) else 0
        if self._take_over(live):
            return None
        if live.guard.inherited and not self._carries(live, exact):
            return None
        if live.discovered and not live.admitted:  # others may have been admitted since it arrived
            params = discover(live.request, self.config, self.index)
            live.prompt = resolve(live.request, params, self.config)
        prompt = live.prompt
        live.held = self.planner.look_up(prompt)
        if self._wants_reserved(live, exact) and _may_wait(live):
            return None
        if prompt.params.mode is Mode.OBSERVE:
            audits = self.planner.audits(prompt, live.held, exact, prompt.params.audit)
            if live.shadow is not None:
                audits = self._served(live.shadow)
            live.contribution = replace(live.contribution, audits=audits)
            live.planned = self.planner.dense(prompt)
            return 0
        live.planned = self.planner.plan(prompt, live.held, exact, prompt.policy)
        live.plan_ms = (time.perf_counter() - started) * 1e3
        plan = live.planned.plan
        if plan is None:
            live.reason = live.planned.reason
            live.approximate = live.carried > 0
            return 0
        if live.dense_instead is None:
            live.dense_instead = self.planner.dense_instead(prompt, live.planned)
        if live.dense_instead and self._leave_past(live):
            return None
        if live.dense_instead:
            live.reason = live.dense_instead
            audits = self.planner.audits(prompt, live.held, exact, (prompt.policy,))
            live.contribution = replace(live.contribution, audits=audits)
            return 0
        if self._repairing and self._repairing + plan.repaired > self.config.max_repair_tokens:
            return None
        if hits_unwritten(live.request, exact, self._hash_block, self._requests()):
            return None
        live.plan = plan
        if plan.first_approximate is not None:
            live.guard.protect(plan.first_approximate)
        live.approximate = live.guard.active
        for span in plan.spans:
            entry = live.planned.candidates[span.candidate].entry
            if entry is not None:
                self.index.touch(entry)
        self._planned.append(live)
        self._repairing += plan.repaired
        return plan.external

    def _carries(self, live: LiveRequest, exact: int) -> bool:
        """Note what vLLM has found of the agent's own past; if it is not to be used, it does not look for it again.

        Returns:
            whether what it has found still stands.
        """
        found = exact // self._hash_block
        if exact <= live.guard.untouched:  # evicted since it was looked for: what was found is exact
            self._leave_past(live)
            return True
        if live.guard.forgotten or self.cached_blocks(live.guard.exact_hashes[:found]) == found:
            self._leave_past(live)
            return False
        self._note_carried(live)
        return True

    def _note_carried(self, live: LiveRequest) -> None:
        """Of what vLLM has found, hidden blocks are the agent's own past."""
        exact = live.guard.untouched
        live.carried = max(0, live.exact - exact)
        hidden = live.request.block_hashes[exact // self._hash_block : -(-live.exact // self._hash_block)]
        live.carried_estimate = min(live.carried, self.lineages.estimates(hidden))

    def _note_estimates(self, live: LiveRequest) -> None:
        """Remember how much of the blocks a request has written is an estimate; again once more of them are full."""
        if live.admitted and live.guard.active:
            written = live.plan or Plan(live.exact, live.exact)
            self.lineages.note_estimates(written, live.request.block_hashes, self._hash_block)

    def _wants_reserved(self, live: LiveRequest, exact: int) -> bool:
        """Another request is computing a content that this one could load."""
        return any(
            segment.part is Part.CONTENT
            and held.entry is not None
            and not held.entry.ready
            and segment.segment.end > exact
            for segment, held in zip(live.prompt.segments, live.held, strict=True)
        )

    def update_state_after_alloc(self, request: Request, blocks: Iterable[int], external: int) -> None:
        """vLLM has admitted a request and given it blocks."""
        live = self._live.get(request.request_id)
        if live is None:
            return
        if live.plan is not None and external != live.plan.external and live in self._planned:
            self._forget_plan(live)
            live.reason = "vLLM did not take the plan"
        live.blocks = tuple(blocks)
        if live.admitted:
            return
        live.admitted = True
        self.lineages.compute(request.block_hashes[live.exact // self._hash_block :])
        self._note_estimates(live)
        if not live.refusal and live.prompt.params.mode is not Mode.DENSE:
            reserved = self.reservations.reserve_prompt(live.prompt, live.held, approximate=live.approximate)
            live.contribution = replace(reserved, audits=live.contribution.audits)

    # ---- every step ------------------------------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> StepMetadata:
        """Orders for the workers in this step."""
        meta = StepMetadata(tokens=sum(output.num_scheduled_tokens.values()), weights=self.workers.weights)
        self._step += 1
        for live in tuple(self._planned):
            if live.admitted and live.plan is not None:
                meta.loads.append(load_job(live.prompt, live.planned, live.plan, live.blocks))
            else:
                self._forget_plan(live)
        self._planned, self._repairing = [], 0
        for live in self._live.values():
            self._notice_preemption(live)
            if live.prompt_done and live.shadow is None:  # what follows from one of ours comes step by step
                self._order_early(live, meta)
        for req_id, tokens in output.num_scheduled_tokens.items():
            scheduled = self._live.get(req_id)
            if scheduled is not None and not scheduled.prompt_done:
                # vLLM has not yet added this step's tokens to ``num_computed_tokens``.
                computed = scheduled.request.num_computed_tokens + tokens
                scheduled.prompt_done = computed >= scheduled.prompt.length
        self.shadows.order(meta)
        for last in self._finished:
            meta.audits.extend(last.audits)
            meta.harvests.extend(last.harvests)
            meta.observes.extend(last.observes)
            meta.releases.append(last.req_id)
        self._finished = []
        # A reference may have been withdrawn while its harvest was due (a reset, a released session). Workers drop
        # before they harvest, so such a copy would stay for good.
        self.index.tidy(self._step, self.config.session_ttl_s)
        meta.harvests = [job for job in meta.harvests if self.index.by_id(job.ref_id) is not None]
        for job in meta.harvests:
            self.index.ordered(job.ref_id, self._step)
        meta.drops = self.index.take_drops()
        return meta

    def _order_early(self, live: LiveRequest, meta: StepMetadata) -> None:
        """A prompt is complete while its answer grows: have it harvested, and learned from unless it is audited."""
        contribution = live.contribution
        if not contribution.harvests and not contribution.examples:
            return
        blocks = self.block_ids(live.request.request_id)
        meta.harvests.extend(self._harvests(live, blocks))
        if not contribution.audits:  # an audit comes before learning
            meta.observes.extend(self._observes(live, blocks))
        kept = contribution.examples if contribution.audits else ()
        live.contribution = Contribution((), kept, contribution.audits)

    def _harvests(self, live: LiveRequest, blocks: tuple[int, ...]) -> list[HarvestJob]:
        check_ids = () if self.workers.verified else live.prompt.token_ids
        return harvest_jobs(live.contribution.harvests, blocks, check_ids)

    def _observes(self, live: LiveRequest, blocks: tuple[int, ...]) -> list[ObserveJob]:
        held = [example for example in live.contribution.examples if self.index.by_id(example.ref_id) is not None]
        return observe_jobs(held, blocks)

    def update_connector_output(self, report: WorkerReport) -> None:
        """Take in what the workers have done."""
        weights = self.workers.weights
        try:
            self.meter.acknowledged(report)
            self._reports.take_in(report, self._live)
            self._forget_spoilt(report)
            if report.audit_over:
                self.shadows.audited(report.audit_over)
            if self.workers.weights != weights:  # blocks are still to be released, but nothing is to be had from them
                self._finished = [LastJobs(last.req_id, [], [], []) for last in self._finished]
                self.lineages.clear()
                self.shadows.clear()
        except Exception as error:  # as if the answer had been lost
            logger.exception("The workers' report could not be taken in")
            self.breaker.fault("report", str(error))

    def note_loads(self, report: WorkerReport) -> None:
        """Note how loads went before their requests end in the same step; the same report comes again afterwards."""
        for req_id, result in report.loads.items():
            if req_id in self._live:
                self._live[req_id].result = result
        self._forget_spoilt(report)

    def _forget_spoilt(self, report: WorkerReport) -> None:
        """Where a load has failed, nobody goes on from what it has left."""
        for req_id, result in report.loads.items():
            if result.fault and req_id in self._live:
                self.lineages.forget(self._live[req_id].prompt)

    # ---- end -------------------------------------------------------------------------------------------------------

    def request_finished(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended, well or not.

        Returns:
            whether its blocks must be kept until the next step's harvest is done, and the report for the client.
        """
        self._others.pop(request.request_id, None)
        live = self._live.pop(request.request_id, None)
        ours = self.shadows.task_of(request.request_id) is not None
        try:
            if live is not None:
                return self._end_shadow(live, tuple(blocks)) if ours else self._end(live, tuple(blocks))
        except Exception as error:  # costs what the request would have left behind, nothing else
            logger.exception("What request %s leaves behind could not be kept", request.request_id)
            self.breaker.fault("plan", str(error))
            self._finished = [last for last in self._finished if last.req_id != request.request_id]
            self.index.withdraw_owner(request.request_id)
        finally:
            if ours and self.shadows.task_of(request.request_id) is not None:  # what it was for could not be kept
                self.shadows.ended(None)
            if not ours and not self._others and not self._live:
                self.shadows.rest()
        return False, None

    def _end(self, live: LiveRequest, blocks: tuple[int, ...]) -> tuple[bool, dict[str, Any] | None]:
        self._notice_preemption(live)
        self._note_estimates(live)
        self.index.scopes.leave(live.prompt.scope, self.index.clock())
        if live in self._planned:
            self._planned.remove(live)
        stopped = live.request.status == RequestStatus.FINISHED_STOPPED
        complete = stopped or live.request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        last = LastJobs(live.request.request_id, [], [], [])
        if live.prompt_done and complete:
            last = self._last_jobs(live, blocks, stopped=stopped)
            self._note_for_later(live)
        else:
            self.reservations.give_up(live.contribution)
        if last:
            self._finished.append(last)
        if live.prompt.params.release and self.config.isolation is Isolation.SESSION:
            self.index.withdraw_scope(live.prompt.scope)
            self._forget_session(live.prompt.params.tenant, live.prompt.params.session)
        report = live.report()
        self.meter.finished(report, computed=live.prompt_done)
        return bool(last), {WIRE_KEY: report.model_dump(mode="json")}

    def _end_shadow(self, live: LiveRequest, blocks: tuple[int, ...]) -> tuple[bool, dict[str, Any] | None]:
        """A request of ours has ended: what it has computed is exact, and the rest is done step by step.

        Returns:
            as of ``request_finished``; nobody is told anything.
        """
        assert live.shadow is not None
        self._notice_preemption(live)
        self.index.scopes.leave(live.prompt.scope, self.index.clock())
        computed = live.request.num_computed_tokens
        self.lineages.settle(live.request.block_hashes[live.exact // self._hash_block : computed // self._hash_block])
        done = live.prompt_done and live.request.status == RequestStatus.FINISHED_LENGTH_CAPPED and not live.outdated
        self.meter.shadow(max(0, computed - live.exact), done=done)
        if not done:
            self.reservations.give_up(live.contribution)
            self.shadows.ended(None)
            return False, None
        audit = audit_job(live.shadow.prompt, live.contribution.audits, live.shadow.answer, blocks)
        jobs = FollowUp(live.request.request_id, live.shadow, deque([] if audit is None else [audit]))
        jobs.observes.extend(self._observes(live, blocks))
        jobs.harvests.extend(self._harvests(live, blocks))
        self.shadows.ended(jobs)
        return True, None

    def _served(self, task: ShadowTask) -> tuple[Planned, ...]:
        """The plan that was carried out, if all that it loaded from is still held."""
        if task.served is None or task.served.plan is None or self.workers.repair_refusal is not None:
            return ()
        entries = [task.served.candidates[span.candidate].entry for span in task.served.plan.spans]
        held = all(entry is not None and self.index.by_id(entry.ref_id) is entry for entry in entries)
        return (task.served,) if held and task.served.plan.first_approximate is not None else ()

    def _note_for_later(self, live: LiveRequest) -> None:
        """A prompt that holds estimates is to be computed again when nobody waits."""
        if not live.approximate or live.outdated or live.prompt.params.release or not self.shadows.wanted:
            return
        done = live.plan is not None and live.result is not None and not live.result.fault
        loaded = live.plan.loaded if done and live.plan is not None else 0
        self.shadows.queue.add(
            ShadowTask(
                prompt=live.prompt,
                answer=tuple(live.request.output_token_ids),
                served=live.planned if loaded else None,
                estimates=loaded + live.carried_estimate,
                young=bool(loaded) and self.planner.teaches(live.planned, live.prompt.traits),
                salt=live.request.cache_salt,
                born=time.monotonic(),
            )
        )

    def _last_jobs(self, live: LiveRequest, blocks: tuple[int, ...], *, stopped: bool) -> LastJobs:
        """What is still to be kept and learned of a request that ended well, its answer included."""
        harvests = self._harvests(live, blocks)
        sampled = list(live.request.output_token_ids)
        if not live.refusal and not live.outdated:
            answer = sampled[:-1] if stopped else sampled
            computed = min(len(answer), live.request.num_output_tokens - 1)
            kept = self.reservations.reserve_answer(live.prompt, answer, computed, approximate=live.approximate)
            harvests += harvest_jobs((kept,), blocks, ()) if kept is not None else []
        audit = audit_job(live.prompt, live.contribution.audits, sampled, blocks)
        return LastJobs(
            live.request.request_id, harvests, self._observes(live, blocks), [] if audit is None else [audit]
        )

    def release_session(self, tenant: str, session: str) -> int:
        """Forget the references of a session; returns how many there were."""
        self._forget_session(tenant, session)
        named = [scope for scope in self.index.scopes if names_session(scope, tenant, session)]
        return sum(self.index.withdraw_scope(scope) for scope in named)

    def _forget_session(self, tenant: str, session: str) -> None:
        self.lineages.forget_session(tenant, session)
        self.shadows.forget_session(tenant, session)

    def reset_cache(self) -> None:
        """Forget all references, as the user asked, and reuse again if faults had stopped it.

        Learned corrections stay: only other weights make them worthless, and workers notice those.
        """
        self.index.clear()
        self.lineages.clear()
        self.shadows.clear()
        self.breaker.reset()

    # ---- bookkeeping -----------------------------------------------------------------------------------------------

    def _requests(self) -> Iterable[Request]:
        yield from (live.request for live in self._live.values())
        yield from self._others.values()

    def _forget_plan(self, live: LiveRequest) -> None:
        """Undo a plan that vLLM has given no blocks for."""
        live.guard.restore()
        live.approximate = live.guard.inherited
        if live in self._planned:
            self._planned.remove(live)
            self._repairing -= live.plan.repaired if live.plan is not None else 0
        live.plan = None

    def _notice_preemption(self, live: LiveRequest) -> None:
        if live.request.num_preemptions == live.preemptions:
            return
        live.preemptions = live.request.num_preemptions
        self._note_estimates(live)
        self.reservations.give_up(live.contribution)
        live.contribution = Contribution()
        live.plan, live.result = None, None
        live.admitted = False
        live.prompt_done = False


def _may_wait(live: LiveRequest) -> bool:
    """Whether a request has patience left; the first call starts its clock."""
    now = time.monotonic()
    live.first_wait = live.first_wait or now
    return now - live.first_wait < PREFILL_WAIT_S


def hits_unwritten(request: Request, exact: int, hash_block: int, others: Iterable[Request]) -> bool:
    """The exact hit holds a block that another request is about to write in this very step.

    vLLM files blocks before they are computed; its own forward copes, but the repair pass runs before it.
    """
    blocks = exact // hash_block
    return blocks > 0 and any(
        other is not request
        and other.status == RequestStatus.RUNNING
        and other.num_computed_tokens < exact
        and _shares(request, other, other.num_computed_tokens // hash_block, blocks)
        for other in others
    )


def _shares(one: Request, other: Request, first: int, end: int) -> bool:
    """Whether two requests file one of the blocks ``[first, end)`` under the same hash."""
    return any(map(operator.eq, one.block_hashes[first:end], other.block_hashes[first:end]))
