"""What the scheduler half tells the worker half each step, and what the worker half answers. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcomm_integrations.connector.compat import KVConnectorMetadata, KVConnectorWorkerMetadata
from kvcomm_integrations.reuse.edge import Edge


@dataclass(frozen=True)
class LoadSpan:
    """Tokens ``[start, end)`` of a prompt come from a reference, whose token ``offset`` belongs at ``start``."""

    ref_id: int
    offset: int
    start: int
    end: int
    edge: Edge
    exact: bool = False
    """The reference is the beginning of the very same prompt: copied as it is, not corrected."""


@dataclass(frozen=True)
class LoadJob:
    """Fill the external tokens of one request before this step's forward: load spans, then repair the gaps."""

    req_id: str
    blocks: tuple[int, ...]
    policy: str
    spans: tuple[LoadSpan, ...]
    gaps: tuple[tuple[int, int], ...]
    token_ids: tuple[int, ...]
    """Token ids of the prompt from ``exact`` to ``end``: of the gaps, and of everything should a load fail."""
    exact: int
    end: int


@dataclass(frozen=True)
class HarvestJob:
    """Copy tokens ``[start, end)`` of a sequence into the reference store, after this step's forward."""

    ref_id: int
    blocks: tuple[int, ...]
    start: int
    end: int
    name: str
    source: str
    scope: str
    dense: bool
    exact: bool = False
    """Keep the keys rotated: the beginning of a prompt, to be copied to the same positions."""
    check_ids: tuple[int, ...] = ()
    """Token ids of the sequence's first tokens: verify the rotation on them first (invariant 3)."""


@dataclass(frozen=True)
class ObserveJob:
    """Learn an edge from a dense prefill: tokens from ``start`` on are the truth for a reference from ``offset`` on."""

    policy: str
    edge: Edge
    ref_id: int
    offset: int
    blocks: tuple[int, ...]
    start: int
    tokens: int


@dataclass(frozen=True)
class AuditVariant:
    """What reuse under one policy would have done with a prompt that was computed densely."""

    policy: str
    spans: tuple[LoadSpan, ...]
    gaps: tuple[tuple[int, int], ...]
    end: int


@dataclass(frozen=True)
class AuditJob:
    """Compare a finished dense request with what reuse would have produced, then leave its KV as it was."""

    req_id: str
    blocks: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The prompt and the first tokens of the answer."""
    prompt_tokens: int
    exact: int
    variants: tuple[AuditVariant, ...]


@dataclass(frozen=True)
class AuditResult:
    """How far reuse would have been from the dense run."""

    req_id: str
    policy: str
    edges: tuple[Edge, ...]
    kl: tuple[float, ...]
    """KL(dense || reuse) of the next-token distribution at the answer's first positions, nats, full vocabulary."""
    agreement: tuple[bool, ...]
    """The same token is most likely both ways."""
    prompt_tokens: int
    exact: int
    loaded: int
    repaired: int


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
    weights: int = 0
    """Changes of the model's weights that the scheduler half knew of. A worker that knows of more learns and keeps
    nothing: what these orders speak of was computed with other weights."""


@dataclass(frozen=True)
class LoadResult:
    """What became of a load. ``fault`` is empty if the plan was carried out; otherwise everything was computed."""

    load_ms: float
    repair_ms: float
    """Of the repair pass, or its share of the forward that it joined."""
    fault: str = ""


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
        for seam, count in other.faults.items():
            self.faults[seam] = max(self.faults.get(seam, 0), count)
        for content, value in other.leverage.items():
            self.leverage[content] = max(self.leverage.get(content, value), value)
        self.audits = self.audits or other.audits
        self.verified = self.verified or other.verified
        self.disabled = self.disabled or other.disabled
        self.repair_refusal = self.repair_refusal or other.repair_refusal
        self.repair_known = self.repair_known and other.repair_known
        self.weights = max(self.weights, other.weights)
        return self
