"""The worker: moves tensors as ordered, and decides nothing.

Per step: fill the external tokens of new requests (load, then repair), let vLLM's forward run, then learn, drop and
harvest. Whatever goes wrong while filling ends in computing those tokens, never in leaving them as they were.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from kvcomm_integrations.config import ReferenceDevice, ReuseConfig
from kvcomm_integrations.connector.compat import (
    VllmConfig,
    add_metadata_builder,
    agree_on_faults,
    attention_layers,
    holds_first_layer,
    repair_refusal,
    write_with_engine,
)
from kvcomm_integrations.connector.metadata import StepMetadata, WorkerReport
from kvcomm_integrations.connector.metrics import STATE_BYTES, STORE_BYTES, ReuseStats
from kvcomm_integrations.connector.workarounds import calling_runner, watch_weights
from kvcomm_integrations.connector.worker.audit import audit
from kvcomm_integrations.connector.worker.fault_injection import FaultInjector, InjectionPoint
from kvcomm_integrations.connector.worker.learner import Learner
from kvcomm_integrations.connector.worker.paged_cache import PagedCache, probe_layout
from kvcomm_integrations.connector.worker.repair import Gap, prepare_repair
from kvcomm_integrations.connector.worker.self_check import check_rotation
from kvcomm_integrations.connector.worker.step_clock import StepClock
from kvcomm_integrations.connector.worker.transfer import Arrivals, SpanTransfer
from kvcomm_integrations.errors import EngineError, UnsupportedModelError
from kvcomm_integrations.planning.jobs import (
    AuditJob,
    AuditResult,
    HarvestJob,
    LoadJob,
    LoadResult,
    LoadSpan,
    ObserveJob,
)
from kvcomm_integrations.reuse.kv import KV, is_finite
from kvcomm_integrations.reuse.references import Reference, ReferenceStore
from kvcomm_integrations.reuse.rope import Rope

MEMORY = 8
"""Steps for which bad blocks are remembered: more than vLLM schedules ahead. Refusing longer costs a reference."""


class LoadErrors:
    """Blocks that hold neither exact nor estimated KV."""

    def __init__(self) -> None:
        self._told: set[int] = set()
        self._steps: deque[frozenset[int]] = deque(maxlen=MEMORY)

    def add(self, job: LoadJob, block_size: int) -> None:
        """The external tokens of a request are not there."""
        self._told.update(job.blocks[job.exact // block_size : -(-job.end // block_size)])

    def take(self) -> set[int]:
        """Blocks for vLLM, each told once; call it once a step."""
        told, self._told = self._told, set()
        self._steps.append(frozenset(told))
        return told

    def hold(self, blocks: Iterable[int]) -> bool:
        """Whether any of these blocks was bad a moment ago."""
        return any(self._told.intersection(blocks) or bad.intersection(blocks) for bad in (*self._steps, frozenset()))


logger = logging.getLogger(__name__)

FAILED_ALONE = 71
"""Exit code of a worker that failed where other ranks wait for it."""


class ConnectorWorker:
    """References, learned corrections and the paged cache of one worker.

    Args:
        vllm_config: the engine's configuration.
        config: our settings.
        refusal: why KV of this model cannot be reused; empty if it can.
    """

    def __init__(self, vllm_config: VllmConfig, config: ReuseConfig, refusal: str = "") -> None:
        self.config = config
        self._vllm_config = vllm_config
        self.cache: PagedCache | None = None
        self.rope: Rope | None = None
        self.store = ReferenceStore(config.store_bytes)
        self.learner = Learner(config, self.store)
        self.faults = FaultInjector()
        self.load_errors = LoadErrors()
        self._runner: Any = None
        self.repair_refusal: str | None = "the paged cache has not been made yet"
        """Why the repair pass cannot run here; ``None`` where it can."""
        self.disabled = refusal if config.enabled else "reuse is switched off"
        self.verified = False
        self.weights = 0
        """How often the model's weights have been replaced since the start."""
        self.weights_named = True
        """The weights are those of the folder that vLLM's configuration names."""
        self._mover: SpanTransfer | None = None
        self._arrivals: Arrivals | None = None
        """Harvests on their way to where they are kept; ``None`` where they are there at once."""
        self._report = WorkerReport()
        self._clock: StepClock | None = None
        self._joined_tokens = 0
        """Tokens of the repair pass that the step's forward computes."""
        self._joined = False
        """The repair pass waits for the step's forward to do its work."""
        self._auditing: Generator[list[AuditResult], None, None] | None = None
        """An audit that is carried on step by step."""
        self._audit_tokens = 0
        """Tokens that it may compute in a step."""
        self._sliced = ""
        """The request whose audit was begun last to be carried on step by step."""
        self._released: set[str] = set()
        self._changed = True
        """Something was stored or dropped since the latest statistics."""
        self.audit_log: deque[AuditResult] = deque(maxlen=4096)
        """The latest audits, for whoever asks."""
        self.loaded_tokens = 0
        """Tokens really written from references since the start."""
        self.repaired_tokens = 0
        """Tokens really computed by the repair pass since the start."""

    @property
    def block_size(self) -> int:
        """Tokens per block of the paged cache."""
        assert self.cache is not None
        return self.cache.block_size

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """vLLM has made its paged cache: find out its layout, the model's rotation and the model runner."""
        if self.disabled or not caches:
            return
        self.attach(calling_runner())
        # Only the model's first layer can be checked: the stage that holds it does so for all.
        self.verified = not holds_first_layer()
        layers = attention_layers(self._vllm_config)
        names = list(caches)
        try:
            layout = probe_layout(
                [caches[name] for name in names],
                lambda i, k, v, slots: write_with_engine(layers[names[i]], caches[names[i]], k, v, slots),
            )
            model = self._vllm_config.model_config
            rope = Rope.from_hf_config(model.hf_text_config, table_dtype=model.dtype)
            self.use(PagedCache([caches[name] for name in names], layout), rope)
        except UnsupportedModelError as error:
            self.disable(str(error))

    def use(self, cache: PagedCache, rope: Rope) -> None:
        """Work on this paged cache, with this rotation."""
        self.cache, self.rope = cache, rope
        self._mover = SpanTransfer(cache, rope, self.store, self.learner, self.faults)
        self._arrivals = Arrivals.of(cache.device, keep=self.config.reference_device is ReferenceDevice.DEVICE)
        self.learner.use(cache.device)
        self._clock = StepClock(cache.device)

    def attach(self, runner: Any) -> None:
        """Make the model runner known, which the repair pass needs."""
        self._runner = runner
        watch_weights(runner, self.weights_changed)
        self.repair_refusal = repair_refusal(runner)
        if self.repair_refusal is None:
            add_metadata_builder(runner)
        self._report.repair_known = True
        self._report.repair_refusal = self.repair_refusal

    def disable(self, reason: str) -> None:
        """Stop reusing for good, with one clear error; the engine goes on serving densely."""
        if not self.disabled:
            logger.error("KV reuse is off: %s", reason)
        self.disabled = reason
        self._report.disabled = reason
        self._clear_references()

    def weights_changed(self, named: bool) -> None:
        """Forget all that was held or learned: it came from weights that the model does not have any more.

        Args:
            named: the weights now are those of the folder that vLLM's configuration names.
        """
        self.abandon_audit()
        self.weights += 1
        self.weights_named = named
        self._report.weights = self.weights
        self._report.audits = []
        self._changed = True
        self._clear_references()
        self.learner.forget_all()

    def _clear_references(self) -> None:
        self.store.clear()
        if self._arrivals is not None:
            self._arrivals.clear()

    def step_begins(self, meta: StepMetadata | None = None) -> None:
        """A step's forward is about to run; ``meta``: its orders, where they are new."""
        if meta is not None and meta.abandon_audit:
            self.abandon_audit()
        if self._clock is not None:
            self._clock.begin()

    # ---- before the forward ----------------------------------------------------------------------------------------

    def load(self, meta: StepMetadata) -> None:
        """Fill the external tokens of every request planned for this step."""
        if not meta.loads:
            return
        started = time.perf_counter()
        faults = agree_on_faults([self._try(job) for job in meta.loads])
        load_ms = (time.perf_counter() - started) * 1e3
        started = time.perf_counter()
        faults = self._repair(meta.loads, faults)
        self.step_begins()
        repair_ms = (time.perf_counter() - started) * 1e3
        for job, fault in zip(meta.loads, faults, strict=True):
            self._report.loads[job.req_id] = LoadResult(load_ms, repair_ms, fault)
            if not fault:
                self.loaded_tokens += sum(span.end - span.start for span in job.spans if not span.exact)

    def _try(self, job: LoadJob) -> str:
        """Load the spans of one request; returns what went wrong, if anything did."""
        try:
            self._load_spans(job)
            return ""
        except Exception as error:  # any fault here must end in computing the tokens
            logger.exception("Loading for request %s failed; its tokens are computed", job.req_id)
            return f"{type(error).__name__}: {error}"

    def _repair(self, jobs: list[LoadJob], faults: list[str]) -> list[str]:
        """Compute the gaps, and everything where a load failed; vLLM hears of the blocks where that is impossible.

        Returns:
            what went wrong by now, by job.
        """
        spans = [((job.exact, job.end),) if fault else job.gaps for job, fault in zip(jobs, faults, strict=True)]
        gaps = [gap for job, missing in zip(jobs, spans, strict=True) for gap in _gaps(job, missing)]
        problem = self.repair_refusal
        if gaps and problem is None:
            problem = self._compute(jobs, gaps)
            if not problem:
                return faults
        for number, job in enumerate(jobs):
            if spans[number]:
                faults[number] = faults[number] or str(problem)
                self.load_errors.add(job, self.block_size)
        return faults

    def _compute(self, jobs: list[LoadJob], gaps: list[Gap]) -> str:
        """Run the repair pass, or have the step's forward do its work, unless some rank cannot even prepare it.

        Where it fails inside the model on one of several ranks, this process ends, and the engine with it.

        Returns:
            what went wrong, if anything did.
        """
        assert self.cache is not None
        forward, fault = None, ""
        try:
            self.faults.strike(InjectionPoint.REPAIR)
            forward = prepare_repair(self._runner, self.cache, gaps)
        except Exception as error:
            logger.exception("The repair pass could not be prepared")
            fault = f"{type(error).__name__}: {error}"
        [fault] = agree_on_faults([fault])
        if forward is None or fault:
            return f"the repair pass failed ({fault})"
        try:
            self.faults.strike(InjectionPoint.FORWARD)
            self._joined = forward.join(lambda ms: self._add_repair(jobs, ms))
            if self._joined:
                self._joined_tokens = sum(len(gap.token_ids) for gap in gaps)
            else:
                forward()
        except Exception as error:
            self._end_if_others_wait("the repair pass", error)
            logger.exception("The repair pass failed")
            return f"the repair pass failed ({type(error).__name__}: {error})"
        self.repaired_tokens += sum(len(gap.token_ids) for gap in gaps)
        return ""

    def _add_repair(self, jobs: list[LoadJob], ms: float) -> None:
        """The step's forward has done the repair pass's work, in so many milliseconds of its own."""
        self._joined = False
        for job in jobs:
            result = self._report.loads[job.req_id]
            self._report.loads[job.req_id] = replace(result, repair_ms=result.repair_ms + ms)

    def _end_if_others_wait(self, what: str, error: Exception) -> None:
        """Inside the model ranks wait for one another: where one fails, the engine had better end than hang.

        vLLM only logs what a rank other than the first raises, and the next step's exchange would meet this one's:
        only the end of the process is noticed. vLLM then ends the others and tells whoever waits for an answer.
        """
        if self._vllm_config.parallel_config.world_size > 1:
            logger.critical("%s failed on one of several ranks; this worker ends", what, exc_info=error)
            os._exit(FAILED_ALONE)

    def _load_spans(self, job: LoadJob) -> None:
        assert self._mover is not None
        for span in job.spans:
            if not self._mover.write(job.policy, job.blocks, span):
                self._blame(job.policy, span)
                raise EngineError(f"the estimate of tokens {span.start} to {span.end} holds NaN or infinity")

    def _blame(self, name: str, span: LoadSpan) -> None:
        """An estimate is not finite: drop the reference if it is to blame, else what its edge has learned."""
        if not is_finite(self.store.get(span.ref_id).kv):
            self._report.failed[span.ref_id] = "it holds NaN or infinity"
        elif not span.exact:
            self.learner.forget(name, span.edge)

    # ---- after the forward -----------------------------------------------------------------------------------------

    def save(self, meta: StepMetadata) -> None:
        """Audit, learn, drop and harvest as ordered; none of it can harm the requests.

        Raises:
            EngineError: the forward did not compute what had joined it; the engine ends rather than go on from nothing.
        """
        if self._joined and sys.exception() is None:  # a forward that failed says so itself
            raise EngineError(
                "vLLM's forward went round the repair pass that had joined it: set repair=False, report it"
            )
        if self._clock is not None:
            self._clock.end(meta.tokens + self._joined_tokens)
        self._joined_tokens = 0
        self._changed = self._changed or bool(meta.drops or meta.harvests)
        outdated = meta.weights != self.weights  # the scheduler withdraws what it has ordered, once it has heard
        if outdated:
            self._report.weights = self.weights
        for audited in () if outdated else meta.audits:
            self._audit(audited)
        self._audit_tokens = meta.audit_tokens
        if meta.sliced_audit is not None:
            self._sliced = meta.sliced_audit.req_id
            if not outdated:
                self._begin_audit(meta.sliced_audit, lambda: self._audit_tokens)
        if self._auditing is not None and meta.audit_tokens:
            self._go_on_with_audit()
        if self._auditing is None and meta.audit_tokens:  # told in every step, so that one lost report is no harm
            self._report.audit_over = self._sliced
        for job in () if outdated else meta.observes:
            self._observe(job)
        for ref_id in meta.drops:
            self.store.drop(ref_id)
            self.learner.leverages.drop(ref_id)
            if self._arrivals is not None:
                self._arrivals.cancel(ref_id)
        for harvest in () if outdated else meta.harvests:
            with self._harvesting(harvest):
                self._harvest(harvest)
        self._released.update(meta.releases)

    def _audit(self, job: AuditJob) -> None:
        """Carry out an audit from beginning to end."""
        self._begin_audit(job)
        while self._auditing is not None:
            self._go_on_with_audit()

    def _begin_audit(self, job: AuditJob, budget: Callable[[], int] = lambda: 1 << 30) -> None:
        """Make an audit ready that all ranks can carry out; ``budget``: tokens that its next piece may compute."""
        self.abandon_audit()
        if self.cache is None or self._mover is None or self.load_errors.hold(job.blocks):
            return
        fault = ""
        try:
            self.faults.strike(InjectionPoint.AUDIT)
            for span in (span for variant in job.variants for span in variant.spans):
                self.store.get(span.ref_id)
        except KeyError as error:  # a reference was evicted in the meantime
            logger.info("Audit of request %s was not possible: %s", job.req_id, error)
            fault = str(error)
        except Exception as error:  # a lost audit costs knowledge, nothing else
            logger.exception("Audit of request %s failed", job.req_id)
            self._note_fault("audit")
            fault = str(error)
        [fault] = agree_on_faults([fault])
        if fault:
            return
        self._auditing = audit(
            self._runner,
            self.cache,
            job,
            self._mover.estimate,
            lambda name, mine, true: self.learner.policy(name).select(mine, true),
            budget,
        )

    def _go_on_with_audit(self) -> None:
        """Carry out the next piece of the audit that was begun."""
        assert self._auditing is not None
        try:
            results = next(self._auditing, None)
        except KeyError as error:  # dropped since it was begun, as ordered, on every rank alike
            logger.info("An audit was not possible any more: %s", error)
            results = None
        except Exception as error:
            self._end_if_others_wait("an audit", error)
            logger.exception("An audit failed")
            self._note_fault("audit")
            results = None
        if results is None:
            self._auditing = None
            return
        self._report.audits.extend(results)
        self.audit_log.extend(results)

    def abandon_audit(self) -> None:
        """Undo an audit that is not over: its request's blocks get back what they held."""
        auditing, self._auditing = self._auditing, None
        if auditing is not None:
            auditing.close()

    def _harvest(self, job: HarvestJob) -> None:
        if self.cache is None or self._mover is None or self.disabled:
            self._report.failed[job.ref_id] = self.disabled or "no paged cache"
            return
        if job.check_ids and not self.verified:
            assert self.rope is not None
            verdict = check_rotation(self.cache, self.rope, job.blocks, job.check_ids)
            if verdict:
                self.disable(verdict)
                self._report.failed[job.ref_id] = verdict
                return
            self.verified = self._report.verified = verdict is not None
        if self.load_errors.hold(job.blocks):
            self._report.failed[job.ref_id] = "its prompt was never computed"
            return
        read = self.cache.read if job.exact else self._mover.read
        kv = self.faults.spoil(InjectionPoint.HARVEST, read(job.blocks, job.start, job.end))
        if self._arrivals is None:
            self._store(job, kv, is_finite(kv))
        else:
            self._arrivals.expect(job, kv)

    def _store(self, job: HarvestJob, kv: KV, finite: bool) -> None:
        """Keep what was harvested; from now on it may be promised to requests."""
        if not finite:
            raise EngineError("the engine's own KV holds NaN or infinity")
        reference = Reference(
            ref_id=job.ref_id,
            keys=kv.keys,
            values=kv.values,
            position=job.start,
            source=job.source,
            dense=job.dense,
            name=job.name,
            rotated=job.exact,
        )
        self.store.put(reference)
        self._changed = True
        self._report.stored[job.ref_id] = 1
        if not job.exact:
            self.learner.rate(reference)

    @contextmanager
    def _harvesting(self, job: HarvestJob) -> Iterator[None]:
        """Report what fails inside: a lost reference costs a dense prefill, nothing else."""
        try:
            yield
        except Exception as error:
            logger.exception("Harvest of %s failed", job.name)
            self._report.failed[job.ref_id] = f"{type(error).__name__}: {error}"

    def _observe(self, job: ObserveJob) -> None:
        if self._mover is None or self.load_errors.hold(job.blocks):
            return
        try:
            reference = self.store.get(job.ref_id)
            truth = self._mover.read(job.blocks, job.start, job.start + job.tokens)
            truth = self.faults.spoil(InjectionPoint.OBSERVE, truth)
            if not is_finite(truth):
                raise EngineError("the engine's own KV holds NaN or infinity")
            part = slice(job.offset, job.offset + job.tokens)
            self.learner.learn(job.policy, job.edge, reference, part, truth, job.first)
        except KeyError as error:  # a reference that failed to be stored on this rank
            logger.info("Learning from %s for %s was not possible: %s", job.edge.source, job.edge.target, error)
        except Exception:  # a lost example costs some accuracy later, nothing else
            logger.exception("Learning from %s for %s failed", job.edge.source, job.edge.target)
            self._note_fault("learn")

    def _note_fault(self, what: str) -> None:
        self._report.faults[what] = self._report.faults.get(what, 0) + 1

    # ---- answers ---------------------------------------------------------------------------------------------------

    def take_released(self) -> set[str]:
        """Finished requests whose blocks vLLM may free now."""
        released, self._released = self._released, set()
        return released

    def take_report(self) -> WorkerReport | None:
        """What happened since the last call, or ``None``."""
        for job, arrived in self._arrivals.take() if self._arrivals is not None else ():
            with self._harvesting(job):
                self._store(job, *arrived())
        report, self._report = self._report, WorkerReport()
        self.learner.tell(report)
        report.forward = self._clock.take() if self._clock is not None else None
        if report == WorkerReport() or self.faults.strike(InjectionPoint.REPORT):
            return None
        if self._runner is not None:  # told again and again: a rank whose answer comes late must not be missed
            report.repair_known, report.repair_refusal = True, self.repair_refusal
        report.weights = self.weights
        return report

    def take_stats(self) -> ReuseStats | None:
        """Bytes held on this worker, or ``None`` if nothing was stored, dropped or learned since the last call."""
        if not (self._changed or self.learner.changed):
            return None
        self._changed = self.learner.changed = False
        stats, rank = ReuseStats(), str(self._vllm_config.parallel_config.rank)
        stats.gauge(STORE_BYTES, self.store.nbytes, rank)
        stats.gauge(STATE_BYTES, self.learner.nbytes, rank)
        return stats


def _gaps(job: LoadJob, spans: tuple[tuple[int, int], ...]) -> list[Gap]:
    return [Gap(job.blocks, s, job.token_ids[s - job.exact : e - job.exact]) for s, e in spans if e > s]
