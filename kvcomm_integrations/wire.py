"""What crosses the border between a client and the engine: request parameters going in, a report coming out.

Knows nothing of messages, tensors or vLLM. ``KVCommParams`` travels in ``kv_transfer_params["kvcomm"]`` and
``RequestReport`` comes back under the same key, in process and over HTTP alike.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvcomm_integrations.errors import WireError

WIRE_KEY = "kvcomm"
WIRE_VERSION = 1
INFO_PATH = "/v1/kvcomm"
"""Where a server with the kvcomm connector says so: a ``ServerInfo``."""
TOKENIZER_PATH = "/v1/kvcomm/tokenizer"
"""Where such a server hands out its tokenizer's files: a JSON object of names and texts."""
SESSION_HEADER = "X-Session-ID"
"""Header with a hash of tenant and session, by which routers keep a session on one replica."""
TREATMENTS = ("exact", "carried", "loaded", "repaired", "computed")
SHOWN_ORDER = ("exact", "carried", "repaired", "loaded", "computed")
"""What can become of a prompt token; each is a count of ``SegmentReport`` and of ``RequestReport``."""
MAX_SEGMENTS = 4096
MAX_NAME = 256
MAX_FIELDS = 64
MAX_MESSAGE = 1024
MAX_POSITION = 1 << 53


def first_problem(error: ValidationError, whole: str) -> str:
    """Where a value is not valid and why: ``<field>: <message>``, with ``whole`` where no field is to blame."""
    first = error.errors(include_input=False, include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or whole
    return f"{place[:MAX_NAME]}: {first['msg'][:MAX_MESSAGE]}"


class SegmentKind(StrEnum):
    """What a segment is: template text, or shared content with a name."""

    FIXED = "fixed"
    PLACEHOLDER = "placeholder"


class Mode(StrEnum):
    """How a request wants to be treated.

    ``auto``: reuse where the gate allows it. ``dense``: never load, never learn, never harvest. ``observe``: compute
    densely, but harvest and learn from it.
    """

    AUTO = "auto"
    DENSE = "dense"
    OBSERVE = "observe"


class Health(StrEnum):
    """What audits have made of an edge."""

    PROVEN = "proven"
    """A familiar content is repaired no deeper than ``mature_depth``, however long it is; with each further proof half
    as deep."""
    OPEN = "open"
    DEEPER = "deeper"
    """Always repaired twice as deep as an edge without examples."""
    CLOSED = "closed"
    """Not loaded."""


class Segment(BaseModel):
    """A contiguous token span ``[start, end)`` of a prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: SegmentKind
    name: str = Field(default="", max_length=MAX_NAME)
    start: int = Field(ge=0, le=MAX_POSITION)
    end: int = Field(ge=0, le=MAX_POSITION)

    @model_validator(mode="after")
    def _check(self) -> Segment:
        if self.end <= self.start:
            raise ValueError(f"segment {self.name!r} is empty or reversed: [{self.start}, {self.end})")
        if self.kind is SegmentKind.PLACEHOLDER and not self.name:
            raise ValueError(f"placeholder segment [{self.start}, {self.end}) has no name")
        return self


class KVCommParams(BaseModel):
    """Everything the engine needs to know about one request, apart from its token ids.

    Segments are ordered, do not overlap and may leave gaps (a gap is a fixed segment without a name).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = WIRE_VERSION
    agent: str = Field(default="default", max_length=MAX_NAME)
    session: str = Field(default="default", max_length=MAX_NAME)
    tenant: str = Field(default="default", max_length=MAX_NAME)
    segments: tuple[Segment, ...] = Field(default=(), max_length=MAX_SEGMENTS)
    response_name: str | None = Field(default=None, max_length=MAX_NAME)
    mode: Mode = Mode.AUTO
    policy: str | None = Field(default=None, max_length=64)
    audit: tuple[str, ...] = Field(default=(), max_length=16)
    """Under ``observe``: policies to learn with, and to be compared with the dense result once the request is over."""
    audit_tokens: int = Field(default=4, ge=0, le=256)
    """Tokens of the answer that an audit goes over, beyond the first."""
    teach: bool = True
    """Let policies learn from this request if it is computed densely."""
    release: bool = False
    """Drop the session's contents once this request is over: it was the session's last. Under ``isolation`` ``session``
    only, for otherwise other sessions may need them."""

    @model_validator(mode="after")
    def _check(self) -> KVCommParams:
        if self.version != WIRE_VERSION:
            raise ValueError(f"wire version {self.version} is not supported; this build speaks version {WIRE_VERSION}")
        end = 0
        for seg in self.segments:
            if seg.start < end:
                raise ValueError(
                    f"segment {seg.name!r} [{seg.start}, {seg.end}) overlaps the one before it (ends {end})"
                )
            end = seg.end
        return self

    def to_transfer_params(self) -> dict[str, Any]:
        """The dict to put into vLLM's ``kv_transfer_params``."""
        return {WIRE_KEY: self.model_dump(mode="json", exclude_defaults=True)}

    @classmethod
    def from_transfer_params(cls, params: dict[str, Any] | None, num_prompt_tokens: int) -> KVCommParams | None:
        """Read and check the parameters of a request; ``None`` if the request carries none.

        Raises:
            WireError: wrong types, unknown version, segments out of range, overlapping or too many.
        """
        if not isinstance(params, dict) or WIRE_KEY not in params:
            return None
        raw = params[WIRE_KEY]
        if not isinstance(raw, dict):
            raise WireError(f"kv_transfer_params[{WIRE_KEY!r}] must be an object, got {type(raw).__name__}")
        if len(raw) > MAX_FIELDS:
            raise WireError(f"kv_transfer_params[{WIRE_KEY!r}] has {len(raw)} fields, more than there are")
        segments = raw.get("segments", ())
        if isinstance(segments, (list, tuple)) and len(segments) > MAX_SEGMENTS:
            raise WireError(f"{len(segments)} segments are more than the {MAX_SEGMENTS} allowed")
        try:
            parsed = cls.model_validate(raw)
        except ValidationError as err:
            raise WireError(
                f"kv_transfer_params[{WIRE_KEY!r}] is not valid at {first_problem(err, 'request')}"
            ) from err
        if parsed.segments and parsed.segments[-1].end > num_prompt_tokens:
            last = parsed.segments[-1]
            raise WireError(f"segment {last.name!r} ends at {last.end}, beyond the prompt's {num_prompt_tokens} tokens")
        return parsed


class EdgeReport(BaseModel):
    """What is known of the way a content took: from whose cache, to whom, and what audits made of it."""

    model_config = ConfigDict(frozen=True)

    source: str
    """Agent whose cache the reference was taken from."""
    target: str
    """Agent whose prompt it goes into."""
    name: str
    """Placeholder."""
    reference: str = ""
    """Why this reference: producer, first consumer, or the previous one in a chain."""
    health: Health = Health.OPEN
    """What audits have made of it. A word that this version does not know, from a newer server, is read as ``open``."""
    why: str = ""
    """Why its health is what it is."""
    audits: int = 0
    """Audits since that last changed."""
    divergence: float | None = None
    """Last audited first-token KL, nats; ``None`` before the first audit, or if it was not a finite number."""
    divergence_low: float | None = None
    divergence_high: float | None = None
    """90 % bounds of the mean over these audits, nats."""

    @field_validator("health", mode="before")
    @classmethod
    def _known_health(cls, value: object) -> object:
        return Health.OPEN if isinstance(value, str) and value not in tuple(Health) else value


class TokenCounts(BaseModel):
    """What became of tokens, by ``TREATMENTS``."""

    model_config = ConfigDict(frozen=True)

    exact: int = 0
    """From the prefix cache, or a copy of the beginning of an earlier, equal prompt."""
    carried: int = 0
    """Taken over from the agent's own past, where some of the tokens before it are an estimate."""
    loaded: int = 0
    """From a reference plus correction."""
    repaired: int = 0
    """From the repair pass."""
    computed: int = 0
    """From vLLM's own forward."""


class SegmentReport(TokenCounts):
    """What happened to one segment. Token counts add up to ``end - start``."""

    kind: SegmentKind
    name: str = ""
    start: int
    end: int
    source: str = ""
    """Agent whose cache the reference was taken from; empty if nothing was loaded."""
    confidence: float | None = None
    """1 - leverage of the content on its edge, clipped to [0, 1]; ``None`` where nothing was loaded."""
    examples: int = 0
    """Dense observations the edge had learned from when the plan was made."""
    reason: str = ""
    """Why the segment was loaded as it was, or why not."""
    edge: EdgeReport | None = None
    """The edge the segment was judged on; ``None`` where there was no reference to judge."""


class RequestReport(TokenCounts):
    """What happened to one request's prompt. ``mode`` is what was done, not what was asked for."""

    agent: str = "default"
    session: str = "default"
    mode: Mode = Mode.AUTO
    policy: str = ""
    prompt_tokens: int = 0
    settled: int = 0
    """Of the exact tokens, those that an earlier turn had as estimates and that were computed again while nobody
    waited."""
    carried_estimate: int = 0
    """Of the carried tokens, those whose KV was once loaded; the others were repaired or computed over estimates."""
    delayed_ms: float = 0.0
    """How long it waited to be taken in while a shadow request was being computed."""
    plan_ms: float = 0.0
    load_ms: float = 0.0
    repair_ms: float = 0.0
    """The repair pass of the request's step; where it joined vLLM's own forward, its share of that by tokens."""
    expected_ms: float = 0.0
    """What load and repair pass were expected to take; 0 while the engine has not measured enough."""
    dense_ms: float = 0.0
    """What computing the same tokens was expected to take."""
    reason: str = ""
    """Why the request as a whole ran densely; empty if it did not."""
    segments: tuple[SegmentReport, ...] = ()

    @classmethod
    def from_transfer_params(cls, params: dict[str, Any] | None) -> RequestReport | None:
        """The report in a final output's ``kv_transfer_params``, or ``None`` if the engine sent none."""
        if not params or not isinstance(params.get(WIRE_KEY), dict):
            return None
        return cls.model_validate(params[WIRE_KEY])


class ServerInfo(BaseModel):
    """What a server with the kvcomm connector says of itself."""

    model_config = ConfigDict(frozen=True)

    version: str
    """Version of this package on the server."""
    wire: int
    """Wire version the server speaks."""
    connector: bool
    """The engine runs with our connector."""
    refusal: str = ""
    """Why this model's KV cannot be reused; empty if it can."""
    repair_refusal: str | None = None
    """Why the repair pass cannot run; ``None`` where it can."""
    tenants: str = ""
    """Where tenants come from: ``keys``, ``header``, or nowhere."""
