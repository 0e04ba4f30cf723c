"""The worker half: moves tensors as ordered, and decides nothing.

Per step: fill the external tokens of new requests (load, then repair), let vLLM's forward run, then learn, drop and
harvest. Whatever goes wrong while filling ends in computing those tokens, never in leaving them as they were.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.connector.audit import audit
from kvcomm_integrations.connector.compat import VllmConfig, attention_layers, repair_refusal, write_with_engine
from kvcomm_integrations.connector.metadata import (
    AuditJob,
    AuditResult,
    HarvestJob,
    LoadJob,
    LoadResult,
    LoadSpan,
    ObserveJob,
    StepMetadata,
    WorkerReport,
)
from kvcomm_integrations.connector.paged import PagedCache, probe_layout
from kvcomm_integrations.connector.repair import Gap, repair
from kvcomm_integrations.connector.selfcheck import check_rotation
from kvcomm_integrations.errors import EngineError, UnsupportedModelError
from kvcomm_integrations.reuse.policies import create_policy, policy_traits
from kvcomm_integrations.reuse.policies.base import KV, Edge, Policy
from kvcomm_integrations.reuse.references import Reference, ReferenceStore
from kvcomm_integrations.reuse.rope import Rope

logger = logging.getLogger(__name__)


class WorkerHalf:
    """References, learned corrections and the paged cache of one worker.

    Args:
        vllm_config: the engine's configuration.
        config: our settings.
    """

    def __init__(self, vllm_config: VllmConfig, config: ReuseConfig) -> None:
        self.config = config
        self._vllm_config = vllm_config
        self.cache: PagedCache | None = None
        self.rope: Rope | None = None
        self.store = ReferenceStore(config.store_bytes)
        self.policies: dict[str, Policy] = {}
        self._runner: Any = None
        self._attached = False
        self.disabled = "" if config.enabled else "reuse is switched off"
        self.verified = False
        self._report = WorkerReport()
        self._released: set[str] = set()
        self.audit_log: deque[AuditResult] = deque(maxlen=4096)
        """The latest audits, for whoever asks."""
        self.loaded_tokens = 0
        """Tokens really written from references since the start."""
        self.repaired_tokens = 0
        """Tokens really computed by the repair pass since the start."""

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """vLLM has made its paged cache: find out its layout and the model's rotation."""
        if self.disabled or not caches:
            return
        layers = attention_layers(self._vllm_config)
        names = list(caches)
        try:
            layout = probe_layout(
                [caches[name] for name in names],
                lambda i, k, v, slots: write_with_engine(layers[names[i]], caches[names[i]], k, v, slots),
            )
            model = self._vllm_config.model_config
            self.rope = Rope.from_hf_config(model.hf_text_config, table_dtype=model.dtype)
            self.cache = PagedCache([caches[name] for name in names], layout)
        except UnsupportedModelError as error:
            self.disable(str(error))

    def attach(self, runner: Any) -> str | None:
        """Make the model runner known, which the repair pass needs; returns why that pass cannot run, if so."""
        self._runner = runner
        self._attached = True
        refusal = repair_refusal(runner)
        self._report.repair_known = True
        self._report.repair_refusal = refusal
        return refusal

    def disable(self, reason: str) -> None:
        """Stop reusing for good, with one clear error; the engine goes on serving densely."""
        if not self.disabled:
            logger.error("KV reuse is off: %s", reason)
        self.disabled = reason
        self._report.disabled = reason
        self.store.clear()

    # ---- before the forward ----------------------------------------------------------------------------------------

    def load(self, meta: StepMetadata) -> None:
        """Fill the external tokens of every request planned for this step."""
        if not meta.loads:
            return
        timings: dict[str, tuple[float, str]] = {}
        gaps: list[Gap] = []
        for job in meta.loads:
            started = time.perf_counter()
            fault = ""
            try:
                self._load_spans(job)
                self.loaded_tokens += sum(span.end - span.start for span in job.spans if not span.exact)
                gaps.extend(_gaps(job, job.gaps))
            except Exception as error:  # any fault here must end in computing the tokens
                logger.exception("Loading for request %s failed; its tokens are computed", job.req_id)
                if self._vllm_config.parallel_config.world_size > 1:
                    # The other ranks do not know and would run another batch: stopping is better than hanging.
                    raise EngineError(f"loading failed on one of several ranks: {error}") from error
                fault = f"{type(error).__name__}: {error}"
                gaps.extend(_gaps(job, ((job.exact, job.end),)))
            timings[job.req_id] = ((time.perf_counter() - started) * 1e3, fault)
        started = time.perf_counter()
        if gaps:
            if self._runner is None or self.cache is None:
                raise EngineError("a plan needs the repair pass, but the model runner was never attached")
            repair(self._runner, self.cache, gaps)
            self.repaired_tokens += sum(len(gap.token_ids) for gap in gaps)
        repair_ms = (time.perf_counter() - started) * 1e3
        for req_id, (load_ms, fault) in timings.items():
            self._report.loads[req_id] = LoadResult(load_ms, repair_ms, fault)

    def _load_spans(self, job: LoadJob) -> None:
        assert self.cache is not None
        policy = self._policy(job.policy)
        for span in job.spans:
            self.cache.write(job.blocks, span.start, self._estimate(policy, span))

    def _estimate(self, policy: Policy, span: LoadSpan) -> KV:
        """Corrected KV of a span with keys rotated to where they belong."""
        assert self.rope is not None and self.cache is not None
        reference = self.store.get(span.ref_id)
        tokens = slice(span.offset, span.offset + span.end - span.start)
        device = self.cache.device
        part = KV(
            reference.keys[:, :, tokens].to(device, non_blocking=True),
            reference.values[:, :, tokens].to(device, non_blocking=True),
        )
        if span.exact:
            return part
        estimate = policy.correct(span.edge, part, span.offset)
        first = span.start if policy.rotates else reference.position + span.offset
        positions = torch.arange(first, first + span.end - span.start, device=device)
        return KV(self.rope.rotate(estimate.keys, positions), estimate.values)

    # ---- after the forward -----------------------------------------------------------------------------------------

    def save(self, meta: StepMetadata) -> None:
        """Audit, learn, drop and harvest as ordered; none of it can harm the requests."""
        for audited in meta.audits:
            self._audit(audited)
        for job in meta.observes:
            self._observe(job)
        for ref_id in meta.drops:
            self.store.drop(ref_id)
        for harvest in meta.harvests:
            try:
                self._harvest(harvest)
            except Exception as error:  # a lost reference costs a dense prefill, nothing else
                logger.exception("Harvest of %s failed", harvest.name)
                self._report.failed[harvest.ref_id] = f"{type(error).__name__}: {error}"
        self._released.update(meta.releases)

    def _audit(self, job: AuditJob) -> None:
        if self.cache is None:
            return
        try:
            results = audit(
                self._runner,
                self.cache,
                job,
                lambda name, span: self._estimate(self._policy(name), span),
                lambda name, mine, true: self._policy(name).select(mine, true),
            )
        except KeyError as error:  # a reference was evicted in the meantime
            logger.info("Audit of request %s was not possible: %s", job.req_id, error)
            return
        except Exception:  # a lost audit costs knowledge, nothing else
            logger.exception("Audit of request %s failed", job.req_id)
            return
        self._report.audits.extend(results)
        self.audit_log.extend(results)

    def _harvest(self, job: HarvestJob) -> None:
        if self.cache is None or self.disabled:
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
        read = self.cache.read if job.exact else self._read_unrotated
        kv = read(job.blocks, job.start, job.end)
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
        self._report.stored[job.ref_id] = 1
        if not job.exact:
            for name in self.policies:
                self._rate(name, reference)

    def _rate(self, name: str, reference: Reference) -> None:
        """How new the content is to every edge it may travel: computed now, so that the gate only looks it up."""
        policy = self.policies[name]
        for edge in policy.edges():
            if edge.source == reference.source and edge.name == reference.name:
                self._note_leverage(name, policy, edge, reference)

    def _note_leverage(self, name: str, policy: Policy, edge: Edge, reference: Reference) -> None:
        readiness = policy.ready(edge, KV(reference.keys, reference.values))
        if readiness.leverage is not None:
            self._report.leverage[(name, edge, reference.ref_id)] = readiness.leverage

    def _observe(self, job: ObserveJob) -> None:
        try:
            reference = self.store.get(job.ref_id)
            policy = self._policy(job.policy)
            truth = self._read_unrotated(job.blocks, job.start, job.start + job.tokens)
            part = slice(job.offset, job.offset + job.tokens)
            before = policy.edges()
            policy.observe(job.edge, KV(reference.keys[:, :, part], reference.values[:, :, part]), truth)
            self._report.examples[(job.policy, job.edge)] = policy.ready(job.edge).examples
            self._note_forgotten(job.policy, before)
        except Exception:  # a lost example costs some accuracy later, nothing else
            logger.exception("Learning %s failed", job.edge)

    def _note_forgotten(self, name: str, before: Iterable[Edge]) -> None:
        """Report edges that a policy does not know any more (its budget is bounded) as having no examples."""
        for edge in set(before).difference(self.policies[name].edges()):
            self._report.examples[(name, edge)] = 0

    @contextmanager
    def relearning(self, name: str) -> Iterator[Policy]:
        """A policy whose state is replaced inside the block; what it knows afterwards is reported in the next step."""
        policy = self._policy(name)
        before = policy.edges()
        yield policy
        self._note_forgotten(name, before)
        for edge in policy.edges():
            self._report.examples[(name, edge)] = policy.ready(edge).examples
        for reference in map(self.store.get, self.store):
            if not reference.rotated:
                self._rate(name, reference)

    def _read_unrotated(self, blocks: tuple[int, ...], start: int, end: int) -> KV:
        assert self.cache is not None and self.rope is not None
        kv = self.cache.read(blocks, start, end)
        positions = torch.arange(start, end, device=self.cache.device)
        return KV(self.rope.unrotate(kv.keys, positions), kv.values)

    # ---- answers ---------------------------------------------------------------------------------------------------

    def take_released(self) -> set[str]:
        """Finished requests whose blocks vLLM may free now."""
        released, self._released = self._released, set()
        return released

    def take_report(self) -> WorkerReport | None:
        """What happened since the last call, or ``None``."""
        report, self._report = self._report, WorkerReport()
        return None if report == WorkerReport() else report

    def _policy(self, name: str) -> Policy:
        if name not in self.policies:
            options = dict(self.config.policy_options) if name == self.config.policy else {}
            traits = policy_traits(name)
            if traits is not None and traits.learns:
                options.setdefault("max_bytes", self.config.state_bytes)
            self.policies[name] = create_policy(name, **options)
        return self.policies[name]


def _gaps(job: LoadJob, spans: tuple[tuple[int, int], ...]) -> list[Gap]:
    return [Gap(job.blocks, s, job.token_ids[s - job.exact : e - job.exact]) for s, e in spans if e > s]
