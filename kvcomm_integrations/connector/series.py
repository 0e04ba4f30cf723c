"""Every series we export, in one table: what dashboards and documents may name. Knows no vLLM and no Prometheus.

Names begin with ``vllm:`` because vLLM treats such series as its own: it registers them anew with each engine, and they
appear on its ``/metrics`` page. All carry vLLM's labels ``model_name`` and ``engine`` too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
NATS = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Kind(StrEnum):
    """What a series is in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Series:
    """One metric with its own labels."""

    name: str
    kind: Kind
    documentation: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exported(self) -> tuple[str, ...]:
        """Names under which Prometheus sees it."""
        if self.kind is Kind.COUNTER:
            return (f"{self.name}_total",)
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


PROMPT_TOKENS = Series(
    "vllm:kvcomm_prompt_tokens",
    Kind.COUNTER,
    "Prompt tokens of requests with kvcomm parameters, by what was done with them.",
    ("treatment",),
)
AGENT_TOKENS = Series(
    "vllm:kvcomm_agent_tokens",
    Kind.COUNTER,
    "Prompt tokens by agent; agents beyond the most used ones are 'other'.",
    ("agent", "treatment"),
)
EDGE_TOKENS = Series(
    "vllm:kvcomm_edge_tokens",
    Kind.COUNTER,
    "Tokens of shared contents that were loaded over an edge; edges beyond the most used ones are 'other'.",
    ("source", "target", "placeholder", "treatment"),
)
REQUESTS = Series(
    "vllm:kvcomm_requests",
    Kind.COUNTER,
    "Requests with kvcomm parameters: reused, dense, observe, or aborted before the prompt was complete.",
    ("outcome",),
)
PLAN_SECONDS = Series(
    "vllm:kvcomm_plan_seconds", Kind.HISTOGRAM, "Time the scheduler took for a request's plan.", (), SECONDS
)
LOAD_SECONDS = Series(
    "vllm:kvcomm_load_seconds",
    Kind.HISTOGRAM,
    "Time the references of a request's step took to be corrected, rotated and written (slowest rank).",
    (),
    SECONDS,
)
REPAIR_SECONDS = Series(
    "vllm:kvcomm_repair_seconds",
    Kind.HISTOGRAM,
    "Time of the repair pass of a request's step, or its share, by tokens, of the forward that it joined; requests of "
    "one step share one pass.",
    (),
    SECONDS,
)
STORE_BYTES = Series("vllm:kvcomm_store_bytes", Kind.GAUGE, "Bytes of references on a worker.", ("rank",))
STATE_BYTES = Series("vllm:kvcomm_state_bytes", Kind.GAUGE, "Bytes of learned corrections on a worker.", ("rank",))
REFERENCES = Series("vllm:kvcomm_references", Kind.GAUGE, "References held or promised.")
EDGES = Series(
    "vllm:kvcomm_edges", Kind.GAUGE, "Edges by what audits have made of them: open, deeper, closed.", ("verdict",)
)
AUDITS = Series("vllm:kvcomm_audits", Kind.COUNTER, "Audits that were carried out.", ("policy",))
AUDIT_DIVERGENCE = Series(
    "vllm:kvcomm_audit_divergence_nats",
    Kind.HISTOGRAM,
    "KL divergence of the first answer token under reuse from the dense run, in audits of the engine's policy.",
    (),
    NATS,
)
EVICTIONS = Series("vllm:kvcomm_evictions", Kind.COUNTER, "References evicted to make room.")
FAULTS = Series(
    "vllm:kvcomm_faults",
    Kind.COUNTER,
    "Faults, all of which end in dense computation: request (its parameters), plan, load, harvest, learn, audit.",
    ("where",),
)
TRIPS = Series("vllm:kvcomm_breaker_trips", Kind.COUNTER, "Times that faults in a row switched reuse off for a while.")
PAUSED = Series(
    "vllm:kvcomm_paused", Kind.GAUGE, "1 while reuse is switched off after faults, as of the latest request."
)

ALL = (
    PROMPT_TOKENS,
    AGENT_TOKENS,
    EDGE_TOKENS,
    REQUESTS,
    PLAN_SECONDS,
    LOAD_SECONDS,
    REPAIR_SECONDS,
    STORE_BYTES,
    STATE_BYTES,
    REFERENCES,
    EDGES,
    AUDITS,
    AUDIT_DIVERGENCE,
    EVICTIONS,
    FAULTS,
    TRIPS,
    PAUSED,
)
BY_NAME = {series.name: series for series in ALL}
