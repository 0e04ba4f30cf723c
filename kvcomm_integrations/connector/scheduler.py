"""The scheduler half: the order of events. It holds no tensors.

Order of events for one request: ``new`` → ``match`` (once or more, until admitted) → ``allocated`` → ``step`` (every
step) → ``finished``. ``acknowledge`` brings the workers' answers; ``foresee`` brings them earlier to requests that end
in the very step they answer. A plan only promises what every worker has acknowledged.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    unsupported_reason,
)
from kvcomm_integrations.connector.metadata import AuditJob, HarvestJob, ObserveJob, StepMetadata, WorkerReport
from kvcomm_integrations.connector.meter import ReuseMeter
from kvcomm_integrations.errors import WireError
from kvcomm_integrations.planning.content_keys import Contents, Discovery, content_scope, names_session
from kvcomm_integrations.planning.edge_table import EdgeTable
from kvcomm_integrations.planning.job_writer import Jobs
from kvcomm_integrations.planning.plan import Candidate, cover, make_plan, unpredictable
from kvcomm_integrations.planning.planner import Planner
from kvcomm_integrations.planning.reference_index import EntryState, ReferenceIndex
from kvcomm_integrations.planning.request_state import RequestState, WorkersState
from kvcomm_integrations.planning.reservations import Promises
from kvcomm_integrations.wire import WIRE_KEY, KVCommParams, Mode

logger = logging.getLogger(__name__)


class ConnectorScheduler:
    """Index, plans, promises and reports of one engine.

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
        self.contents = Contents(config, self.index)
        self.planner = Planner(config, self.index, self.edges, self.contents, self.workers)
        self.promises = Promises(self.index, self.contents, self.planner, config)
        self.jobs = Jobs(config, self.index, self.contents, self.workers)
        self.discovery = Discovery(config, self.index)
        self.answers = Answers(config, self.index, self.edges, self.workers, self.breaker)
        self.meter = ReuseMeter(config.metric_labels, config.policy, self.index, self.edges, self.breaker)
        self._hash_block = hash_block_size(vllm_config, cache) if cache.kv_cache_groups else 1
        self._tracked: dict[str, RequestState] = {}
        self._others: dict[str, Request] = {}
        """Live requests without our parameters: they too may be computing blocks that others hit."""
        self._planned: list[RequestState] = []
        """Requests with a plan made in this step."""
        self._finished: list[tuple[str, list[HarvestJob], list[ObserveJob], list[AuditJob]]] = []
        """Requests whose blocks are kept until the workers have done these jobs."""
        self._step = 0
        self._repairing = 0
        """Tokens this step's repair pass holds already."""
        self.block_ids: Callable[[str], tuple[int, ...]] = lambda req_id: ()
        """The block table of a live request; set once vLLM's cache manager is known."""

    # ---- arrival and admission -------------------------------------------------------------------------------------

    def new(self, request: Request) -> None:
        """A request has arrived."""
        try:
            self._new(request)
        except Exception as error:  # costs the reuse of one request, nothing else
            logger.exception("Request %s could not be taken in; it is served densely", request.request_id)
            self.breaker.fault("plan", str(error))
            self._others[request.request_id] = request

    def _new(self, request: Request) -> None:
        try:
            params = KVCommParams.from_transfer_params(request.kv_transfer_params, request.num_prompt_tokens)
        except WireError as error:
            logger.warning("Request %s is served densely: %s", request.request_id, error)
            self.meter.refused()
            params = KVCommParams(mode=Mode.DENSE)
            self._track(request, params, refusal=str(error))
            return
        discovered = params is None and self.discovery.wanted(request)
        if discovered:
            params = self.discovery.params(request)
        if params is None:
            self._others[request.request_id] = request
            return
        self._track(request, params, refusal=self.planner.refusal(request, params), discovered=discovered)

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
            external = self._match(tracked, exact)
            self.breaker.success("plan")
            return external
        except Exception as error:  # a fault in planning costs the reuse of one request, nothing else
            logger.exception("Planning request %s failed; it is served densely", request.request_id)
            self._forget_plan(tracked)
            tracked.reason = tracked.refusal = f"planning failed ({type(error).__name__})"
            self.breaker.fault("plan", str(error))
            return 0

    def _match(self, tracked: RequestState, exact: int) -> int | None:
        started = time.perf_counter()
        tracked.exact = min(exact, tracked.prompt_tokens)
        tracked.refusal = tracked.refusal or self.breaker.refusal()
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
        if tracked.discovered and not tracked.admitted:  # others may have been admitted since it arrived
            tracked.params = self.discovery.params(tracked.request)
        if wants_promised(self.contents, tracked, exact) and may_wait(tracked):
            return None
        if tracked.params.mode is Mode.OBSERVE:
            tracked.audits = self.planner.audits(tracked, exact, tracked.params.audit)
            tracked.candidates = [Candidate(s) for s in cover(tracked.params.segments, tracked.prompt_tokens)]
            return 0
        tracked.candidates = self.planner.candidates(tracked, tracked.policy)
        plan = unpredictable(tracked.candidates) or make_plan(
            tracked.prompt_tokens, exact, tracked.candidates, self.planner.limits()
        )
        tracked.plan_ms = (time.perf_counter() - started) * 1e3
        if isinstance(plan, str):
            tracked.reason = plan
            return 0
        if tracked.dense_instead is None:
            tracked.dense_instead = self.planner.dense_instead(tracked, plan)
        if tracked.dense_instead:
            tracked.reason = tracked.dense_instead
            tracked.audits = self.planner.audits(tracked, exact, (tracked.policy,))
            return 0
        if self._repairing and self._repairing + plan.repaired > self.config.max_repair_tokens:
            return None
        if hits_unwritten(tracked.request, exact, self._hash_block, self._live()):
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
            self.promises.promise_prompt(tracked)
            self.promises.prepare_observes(tracked)
            self.promises.note_consumer(tracked)

    # ---- every step ------------------------------------------------------------------------------------------------

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """Orders for the workers in this step."""
        meta = StepMetadata(weights=self.workers.weights)
        self._step += 1
        unadmitted: list[RequestState] = []
        for tracked in self._planned:
            if tracked.admitted and tracked.plan is not None:
                meta.loads.append(self.jobs.load(tracked, tracked.plan))
            elif tracked.plan is not None:
                unadmitted.append(tracked)
        for tracked in unadmitted:
            self._forget_plan(tracked)
        self._planned, self._repairing = [], 0
        for tracked in self._tracked.values():
            self._notice_preemption(tracked)
            if tracked.prompt_done and tracked.harvests:
                meta.harvests.extend(self.jobs.harvests(tracked, self.block_ids(tracked.request.request_id)))
            if tracked.prompt_done and tracked.observes and not tracked.audits:  # an audit comes before learning
                meta.observes.extend(self.jobs.observes(tracked, self.block_ids(tracked.request.request_id)))
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
        self.index.tidy(self._step, self.config.session_ttl_s)
        meta.harvests = [job for job in meta.harvests if self.index.by_id(job.ref_id) is not None]
        for job in meta.harvests:
            self.index.ordered(job.ref_id, self._step)
        meta.drops = self.index.take_drops()
        return meta

    def acknowledge(self, report: WorkerReport) -> None:
        """Take in what the workers have done."""
        weights = self.workers.weights
        try:
            self.meter.acknowledged(report)
            self.answers.take(report, self._tracked)
            if self.workers.weights != weights:  # blocks are still to be released, but nothing is to be had from them
                self._finished = [(req_id, [], [], []) for req_id, *_ in self._finished]
        except Exception as error:  # as if the answer had been lost
            logger.exception("The workers' report could not be taken in")
            self.breaker.fault("report", str(error))

    def foresee(self, report: WorkerReport) -> None:
        """Note how loads went before their requests end in the same step; ``acknowledge`` brings the same report."""
        for req_id, result in report.loads.items():
            if req_id in self._tracked:
                self._tracked[req_id].result = result

    def finished(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended, well or not.

        Returns:
            whether its blocks must be kept until the next step's harvest is done, and the report for the client.
        """
        self._others.pop(request.request_id, None)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        try:
            return self._end(tracked, tuple(blocks))
        except Exception as error:  # costs what the request would have left behind, nothing else
            logger.exception("What request %s leaves behind could not be kept", request.request_id)
            self.breaker.fault("plan", str(error))
            self._finished = [job for job in self._finished if job[0] != request.request_id]
            self.index.withdraw_owner(request.request_id)
            return False, None

    def _end(self, tracked: RequestState, blocks: tuple[int, ...]) -> tuple[bool, dict[str, Any] | None]:
        self._notice_preemption(tracked)
        self.index.scopes.leave(tracked.scope, self.index.clock())
        if tracked in self._planned:
            self._planned.remove(tracked)
        done = tracked.prompt_done and self._completed(tracked)
        harvests = self.jobs.harvests(tracked, blocks) if done else []
        self.promises.break_promises(tracked)
        harvests += self.jobs.answer(tracked, blocks) if done else []
        observes = self.jobs.observes(tracked, blocks) if done else []
        audits = self.jobs.audits(tracked, blocks) if done else []
        if harvests or observes or audits:
            self._finished.append((tracked.request.request_id, harvests, observes, audits))
        if tracked.params.release and self.config.isolation is Isolation.SESSION:
            self.index.withdraw_scope(tracked.scope)
        report = tracked.report()
        self.meter.finished(report, computed=tracked.prompt_done)
        return bool(harvests or observes or audits), {WIRE_KEY: report.model_dump(mode="json")}

    def release_session(self, tenant: str, session: str) -> int:
        """Forget the references of a session; returns how many there were."""
        named = [scope for scope in self.index.scopes if names_session(scope, tenant, session)]
        return sum(self.index.withdraw_scope(scope) for scope in named)

    def reset(self) -> None:
        """Forget all references, as the user asked, and reuse again if faults had stopped it.

        Learned corrections stay: only other weights make them worthless, and workers notice those.
        """
        self.index.clear()
        self.breaker.reset()

    # ---- bookkeeping -----------------------------------------------------------------------------------------------

    def _track(self, request: Request, params: KVCommParams, refusal: str, *, discovered: bool = False) -> None:
        scope = content_scope(request, params, self.config.isolation)
        policy = params.policy or self.config.policy
        guard = HashGuard(request, self._hash_block)
        self.index.scopes.enter(scope, self.index.clock())
        self._tracked[request.request_id] = RequestState(request, params, scope, policy, guard, discovered, refusal)

    def _live(self) -> Iterable[Request]:
        yield from (tracked.request for tracked in self._tracked.values())
        yield from self._others.values()

    def _completed(self, tracked: RequestState) -> bool:
        return tracked.request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)

    def _forget_plan(self, tracked: RequestState) -> None:
        """Undo a plan that vLLM has given no blocks for."""
        tracked.guard.restore()
        if tracked in self._planned:
            self._planned.remove(tracked)
            self._repairing -= tracked.plan.repaired if tracked.plan is not None else 0
        tracked.plan = None

    def _notice_preemption(self, tracked: RequestState) -> None:
        if tracked.request.num_preemptions == tracked.preemptions:
            return
        tracked.preemptions = tracked.request.num_preemptions
        self.promises.break_promises(tracked)
        tracked.plan, tracked.result = None, None
        tracked.observes, tracked.audits = [], []
        tracked.admitted = False
        tracked.prompt_done = False


PREFILL_WAIT_S = 60.0
"""Longest wait for another request's prefill before a request goes ahead by itself, seconds."""


def wants_promised(contents: Contents, tracked: RequestState, exact: int) -> bool:
    """Another request is computing a content that this one could load."""
    return any(
        entry is not None and entry.state is EntryState.RESERVED and segment.end > exact
        for segment in contents.placeholders(tracked)
        for entry, _ in (contents.find(tracked, segment),)
    )


def may_wait(tracked: RequestState) -> bool:
    """Whether a request has patience left; the first call starts its clock."""
    now = time.monotonic()
    tracked.first_wait = tracked.first_wait or now
    return now - tracked.first_wait < PREFILL_WAIT_S


def hits_unwritten(request: Request, exact: int, hash_block: int, others: Iterable[Request]) -> bool:
    """The exact hit holds a block that another request is about to write in this very step.

    vLLM files blocks before they are computed; its own forward copes, but the repair pass runs before it.
    """
    blocks = exact // hash_block
    return blocks > 0 and any(
        other is not request
        and other.status == RequestStatus.RUNNING
        and other.num_computed_tokens < exact
        and other.num_computed_tokens < hash_block * _shared(request.block_hashes[:blocks], other.block_hashes)
        for other in others
    )


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Leading blocks that two chains of hashes have in common: blocks that differ never agree again."""
    most = min(len(one), len(other))
    return bisect_left(range(most), True, key=lambda block: one[block] != other[block])


logger = logging.getLogger(__name__)


class Answers:
    """Where the workers' reports go.

    Args:
        config: our settings.
        index: references; an acknowledged one may be promised to requests.
        edges: what is known of each edge.
        workers: what the workers have reported of themselves.
        breaker: counts faults.
    """

    def __init__(
        self,
        config: ReuseConfig,
        index: ReferenceIndex,
        edges: EdgeTable,
        workers: WorkersState,
        breaker: CircuitBreaker,
    ) -> None:
        self.config = config
        self.index = index
        self.edges = edges
        self.workers = workers
        self.breaker = breaker

    def take(self, report: WorkerReport, live: Mapping[str, RequestState]) -> None:
        """Take in one step's report; ``live`` are the requests that still run."""
        self._abilities(report)
        if report.weights > self.workers.weights:
            self._new_weights(report.weights, live)
        self._references(report)
        self._learned(report)
        for seam, count in report.faults.items():
            for _ in range(count):
                self.breaker.fault(seam, "see the worker's log")
        for req_id, result in report.loads.items():
            if result.fault:
                self.breaker.fault("load", result.fault)
            else:
                self.breaker.success("load")
            if req_id in live:
                live[req_id].result = result

    def _abilities(self, report: WorkerReport) -> None:
        if report.disabled and not self.workers.disabled:
            self.workers.disabled = report.disabled
            self.index.clear()
            logger.error("KV reuse is off: %s. Requests are served densely.", report.disabled)
        self.workers.verified = self.workers.verified or report.verified
        if report.repair_known and self.config.repair and self.workers.repair_refusal != report.repair_refusal:
            self.workers.repair_refusal = report.repair_refusal
            if report.repair_refusal:
                logger.warning("No repair pass: %s. Plans stop at the first unknown token.", report.repair_refusal)

    def _new_weights(self, changes: int, live: Mapping[str, RequestState]) -> None:
        """Keys and values of other weights mean nothing: forget all, and keep nothing of what is half computed."""
        logger.warning("The model's weights have changed: references and learned corrections are forgotten")
        self.workers.weights = changes
        self.index.clear()
        self.edges.clear()
        for tracked in live.values():
            tracked.outdated = tracked.outdated or tracked.admitted
            tracked.harvests, tracked.observes, tracked.audits = [], [], []

    def _references(self, report: WorkerReport) -> None:
        for ref_id, reason in report.failed.items():
            logger.warning("Reference %d was not stored: %s", ref_id, reason)
            self.index.withdraw(ref_id)
            self.breaker.fault("harvest", reason)
        for ref_id, ranks in report.stored.items():
            self.index.acknowledge(ref_id, ranks)
            self.breaker.success("harvest")

    def _learned(self, report: WorkerReport) -> None:
        for (policy, edge), examples in report.examples.items():
            self.edges.learned(policy, edge, examples)
            if examples:
                self.breaker.success("learn")
        for (policy, edge, ref_id), leverage in report.leverage.items():
            entry = self.index.by_id(ref_id)
            if entry is not None:
                entry.leverage[(policy, edge)] = leverage
        for audit in report.audits:
            self.breaker.success("audit")
            for edge in audit.edges:
                self.edges.audited(audit.policy, edge, audit.kl[0])
