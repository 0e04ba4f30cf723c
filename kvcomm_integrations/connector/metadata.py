"""What the scheduler tells the worker each step, and what the worker answers. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcomm_integrations.connector.compat import KVConnectorMetadata, KVConnectorWorkerMetadata
from kvcomm_integrations.planning.jobs import AuditJob, AuditResult, HarvestJob, LoadJob, LoadResult, ObserveJob
from kvcomm_integrations.reuse.edge import Edge


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Orders for one engine step, obeyed in this order: load, forward, audit, observe, drop, harvest, release."""

    loads: list[LoadJob] = field(default_factory=list)
    audits: list[AuditJob] = field(default_factory=list)
    observes: list[ObserveJob] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    harvests: list[HarvestJob] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)
    """Finished requests whose blocks may be freed once the jobs above are done."""
    sliced_audit: AuditJob | None = None
    """An audit to begin, to be carried on step by step until it is reported as over."""
    audit_tokens: int = 0
    """Tokens that such an audit may compute in this step; 0: it rests."""
    abandon_audit: bool = False
    """Undo an audit that is not over, before the forward: its blocks hold estimates."""
    tokens: int = 0
    """Tokens that vLLM computes in this step."""
    weights: int = 0
    """Changes of the model's weights that the scheduler knew of. A worker that knows of more learns and keeps
    nothing: what these orders speak of was computed with other weights."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Acknowledgements of one or more ranks."""

    stored: dict[int, int] = field(default_factory=dict)
    """Reference to number of ranks that hold it."""
    failed: dict[int, str] = field(default_factory=dict)
    """References that some rank could not store, with the reason."""
    loads: dict[str, LoadResult] = field(default_factory=dict)
    examples: dict[tuple[str, Edge], int] = field(default_factory=dict)
    """Policy and edge to the number of examples learned from."""
    faults: dict[str, int] = field(default_factory=dict)
    """Faults that harmed no request, by what was being done (``learn``, ``audit``)."""
    leverage: dict[tuple[str, Edge, int], float] = field(default_factory=dict)
    """Policy, edge and reference to how new the content is to the edge."""
    audits: list[AuditResult] = field(default_factory=list)
    audit_over: str = ""
    """The audited request of the latest audit that was carried on step by step and has come to its end, well or not."""
    forward: tuple[int, float] | None = None
    """Tokens of a forward and the milliseconds it took."""
    verified: bool = False
    """The rotation has been checked on real keys."""
    disabled: str = ""
    """Why this worker cannot reuse at all."""
    repair_refusal: str | None = None
    """Why the repair pass cannot run here; ``None`` where it can or where it is not known yet."""
    repair_known: bool = False
    weights: int = 0
    """How often the model's weights have been replaced since the start: what was held and learned before is gone."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the answers of two ranks: counts add up, times and leverages take the larger."""
        assert isinstance(other, WorkerReport)
        for ref, count in other.stored.items():
            self.stored[ref] = self.stored.get(ref, 0) + count
        self.failed.update(other.failed)
        for req, theirs in other.loads.items():
            ours = self.loads.get(req, theirs)
            self.loads[req] = LoadResult(
                max(ours.load_ms, theirs.load_ms), max(ours.repair_ms, theirs.repair_ms), ours.fault or theirs.fault
            )
        for key, count in other.examples.items():
            self.examples[key] = min(self.examples.get(key, count), count)
        for where, count in other.faults.items():
            self.faults[where] = max(self.faults.get(where, 0), count)
        for content, value in other.leverage.items():
            self.leverage[content] = max(self.leverage.get(content, value), value)
        self.audits = self.audits or other.audits
        self.audit_over = self.audit_over or other.audit_over
        self.forward = max(filter(None, (self.forward, other.forward)), key=lambda timed: timed[1], default=None)
        self.verified = self.verified or other.verified
        self.disabled = self.disabled or other.disabled
        self.repair_refusal = self.repair_refusal or other.repair_refusal
        self.repair_known = self.repair_known and other.repair_known
        self.weights = max(self.weights, other.weights)
        return self
