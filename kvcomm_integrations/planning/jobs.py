"""What workers are told to do for one request, and what they answer. Data only."""

from __future__ import annotations

from dataclasses import dataclass

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
    first: int = 0
    """Position of the first of them within the content: what comes before has been learned in an earlier job."""


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


@dataclass(frozen=True)
class LoadResult:
    """What became of a load. ``fault`` is empty if the plan was carried out; otherwise everything was computed."""

    load_ms: float
    repair_ms: float
    """Of the repair pass, or its share of the forward that it joined."""
    fault: str = ""
