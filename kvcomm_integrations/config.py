"""All settings in one place, with defaults that are right. Imports neither torch, vLLM nor a framework."""

from __future__ import annotations

import hashlib
import os
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

API_KEY_VARIABLE = "KVCOMM_API_KEY"
"""Environment variable that holds a server's key where none is given."""


class Isolation(StrEnum):
    """Who may load a content: requests of the same session, of the same tenant, or everyone.

    ``global`` lets one tenant find out by timing what another has sent (CVE-2025-46570 is that kind of leak).
    """

    SESSION = "session"
    TENANT = "tenant"
    GLOBAL = "global"


class ReferenceDevice(StrEnum):
    """Where a worker keeps references. On a CPU both are the same."""

    DEVICE = "device"
    HOST = "host"


class Tokenization(StrEnum):
    """``segmented``: contents are tokenised apart, so their ids are the same in every prompt.
    ``canonical``: the model's ordinary tokenisation of the whole prompt; reuse only where ids agree."""

    SEGMENTED = "segmented"
    CANONICAL = "canonical"


class Gate(StrEnum):
    """Who decides whether a content may be loaded, and how deep it is repaired.

    ``maturity``: an edge's examples, how new the content is to them, and audits. ``entropy``: policies with a criterion
    of their own (``kvcomm``, ``kvcmas``) load what it finds predictable; a request with any other content runs densely
    and teaches them, as in their papers. Other policies keep to ``maturity``.
    """

    MATURITY = "maturity"
    ENTROPY = "entropy"


class Settings(BaseModel):
    """Settings that cannot be changed later; a name that does not exist is refused with the nearest that does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, given: Any) -> Any:
        for name in given if isinstance(given, dict) else ():
            if name not in cls.model_fields:
                near = get_close_matches(str(name), cls.model_fields, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(cls.model_fields)}"
                raise ValueError(f"{cls.__name__} has no setting {name!r}; {hint}")
        return given


class ReuseConfig(Settings):
    """How KV is reused. Travels to the engine as ``kv_connector_extra_config``."""

    enabled: bool = True
    """Off: the connector harvests, loads and learns nothing; the engine equals plain vLLM."""
    policy: str = "ridge"
    """Correction policy: ``ridge``, ``kvcomm``, ``kvcmas``, ``aligned``, ``full_share`` or ``cacheblend`` (which is for
    comparison in audits: requests under it run densely)."""
    isolation: Isolation = Isolation.SESSION
    """Who may load a content."""
    min_segment_tokens: int = Field(default=8, ge=1)
    """Shorter placeholders are computed, tokens."""
    discover_min_tokens: int | None = Field(default=None, ge=16)
    """Runs of so many tokens that an earlier request of the same cache salt had too are reused even where a request
    says nothing of its contents (plain OpenAI clients); ``None``: such requests are left alone."""
    store_bytes: int = Field(default=2 << 30, ge=0)
    """Budget for references on one worker, bytes; the least useful are evicted."""
    reference_device: ReferenceDevice = ReferenceDevice.HOST
    """Where references are kept: ``host`` memory, or the ``device``'s own (loaded faster, but vLLM does not know of it:
    leave room for ``store_bytes``)."""
    tenant_share: float = Field(default=1.0, gt=0, le=1)
    """Largest share of ``store_bytes`` that one tenant's references may take."""
    session_ttl_s: float = Field(default=3600.0, gt=0)
    """References of a session that nobody has used for so long are dropped, seconds."""
    state_bytes: int = Field(default=1 << 30, ge=0)
    """Budget for learned corrections on one worker, bytes."""
    repair: bool = True
    """Run the repair pass. Off: plans stop at the first token that cannot be loaded."""
    repair_depth: int = Field(default=32, ge=0)
    """First tokens of each loaded placeholder that are repaired on an edge without examples (at most half of it)."""
    mature_examples: int = Field(default=4, ge=1)
    """Examples after which an edge repairs only ``mature_depth`` tokens."""
    mature_depth: int = Field(default=8, ge=0)
    """Least number of first tokens repaired on a mature edge (an eighth of the content if that is more, but never more
    than ``repair_depth``)."""
    max_repair_share: float = Field(default=0.6, ge=0, le=1)
    """Repaired share of the prompt's not yet exact tokens above which the request runs densely."""
    max_repair_tokens: int = Field(default=4096, ge=0)
    """Tokens one step's repair pass may hold; requests beyond it wait for the next step or run densely."""
    gate: Gate = Gate.MATURITY
    """Who decides whether a content may be loaded. The threshold of ``entropy`` is the policies' option ``gamma``."""
    chain: bool | None = None
    """Take references from the agent that consumed a content just before, if that one ran dense; costs one more
    reference for every agent that consumes a content densely. ``None``: as the policy wants (``kvcmas`` does)."""
    join_runs: bool = True
    """Load contents that one earlier prompt holds in a row as one run, the template text between them included: only
    the run's beginning is repaired. Off: each content is repaired at its beginning, and all template text."""
    carry: bool = True
    """The next turn of an agent takes over what its last one had, estimates included, where both begin with the same
    tokens. Off: its past is loaded and repaired again."""
    only_if_faster: bool = True
    """Load only where that is expected to be quicker than computing, by what this engine has measured of both."""
    strict: bool = False
    """Wait for ``min_examples`` dense observations before the first load on an edge."""
    min_examples: int = Field(default=4, ge=1)
    """Dense observations an edge needs under ``strict``."""
    learn_rate: float = Field(default=0.0, ge=0, le=1)
    """Share of users' reusable requests over an edge that is not mature yet which run dense to teach it: for engines
    that are never idle, or with ``idle_budget`` 0."""
    audit_rate: float = Field(default=0.0, ge=0, le=1)
    """Share of users' reusable requests that run dense as audits; likewise."""
    idle_budget: int = Field(default=64, ge=0)
    """Requests that may wait to be computed again, exactly, while nobody asks anything (*shadow requests*): they teach,
    audit, and settle what their conversations go on from. 0: none."""
    idle_after_ms: float = Field(default=200.0, ge=0)
    """How long nobody must have asked anything before one begins, ms."""
    idle_slice_ms: float = Field(default=50.0, gt=0)
    """Longest time for which one may keep a user's request waiting, ms: it is computed in slices as long as this, of
    eight tokens at least."""
    max_divergence: float = Field(default=0.5, gt=0)
    """First-token KL (nats) beyond which an edge repairs deeper, then closes."""
    small_divergence: float = Field(default=0.0, ge=0)
    """First-token KL (nats) below which, by its audits, a mature edge repairs only ``mature_depth`` tokens of contents
    of any length, then half and a quarter of that as long as audits agree: faster on long contents, and a little
    further from dense. 0: never."""
    max_faults: int = Field(default=5, ge=0)
    """Faults in a row after which reuse switches itself off for ``fault_pause_s``; 0: never."""
    fault_pause_s: float = Field(default=60.0, gt=0)
    """First pause after too many faults, seconds; it doubles with every relapse, up to an hour."""
    metric_labels: int = Field(default=64, ge=0, le=4096)
    """Agents, and edges, that have metric series of their own: the most used; all others share the label ``other``."""
    policy_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the policy's dataclass (rank, window, gamma, ...)."""
    variants: tuple[str, ...] = ()
    """Policies with other options that requests may name beside the plain ones, such as ``kvcmas:rank=4``. Each keeps
    state of its own within ``state_bytes``, so requests cannot make up more of them."""


def api_key_from_environment() -> SecretStr | None:
    """The key in ``KVCOMM_API_KEY``, if there is one."""
    key = os.environ.get(API_KEY_VARIABLE)
    return SecretStr(key) if key else None


class HttpConfig(Settings):
    """How a server is reached. Only used with ``EngineConfig.base_url``."""

    connect_timeout: float = Field(default=5.0, gt=0)
    """Longest wait for a connection, seconds."""
    read_timeout: float = Field(default=600.0, gt=0)
    """Longest silence of the server, seconds: a queued or long prompt sends nothing before its first token."""
    retries: int = Field(default=2, ge=0)
    """Further tries after a connection error that came before any token; other errors are never tried again."""
    backoff: float = Field(default=0.25, ge=0)
    """Pause before the first further try, seconds; doubles with each one."""
    max_connections: int = Field(default=256, ge=1)
    """Requests that may run at once; more wait for a connection."""
    verify: bool = True
    """Check the server's TLS certificate."""
    ca_file: str | None = None
    """PEM file with the certificate authority to trust in place of the system's."""


class EngineSettings(BaseModel):
    """The settings of an engine that chat models have too."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1)
    """Folder with weights and tokenizer, or a hub id."""
    base_url: str | None = None
    """A vLLM server's ``.../v1`` address; ``None`` runs the engine in this process."""
    api_key: SecretStr | None = Field(default_factory=api_key_from_environment)
    """The server's key; read from ``KVCOMM_API_KEY`` if not given."""
    http: HttpConfig = Field(default_factory=HttpConfig)
    """Timeouts, retries and TLS of a server's connections; a dict of its fields will do."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; ``None``: the model's, which a server with our connector hands out itself."""
    reuse: ReuseConfig = Field(default_factory=ReuseConfig)
    """How KV is reused; a dict of its fields will do."""
    dtype: str = "auto"
    """Weights and cache type; ``auto`` is vLLM's choice: the model's own type, for most bfloat16."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Longest prompt plus answer, tokens; ``None``: the model's own."""
    block_size: int | None = None
    """Paged-cache block, tokens; ``None``: vLLM's choice (128 on the CPU)."""
    tokenization: Tokenization = Tokenization.SEGMENTED
    """How contents are tokenised, see ``Tokenization``."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """More of vLLM's ``AsyncEngineArgs``, passed through."""


class EngineConfig(EngineSettings, Settings):
    """What identifies an engine. Two chat models with equal configurations share one engine."""

    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20)
    """Paged cache, bytes; ``None``: 2 GiB on the CPU, vLLM's choice elsewhere."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    enforce_eager: bool | None = None
    """Run the model without torch.compile and CUDA graphs. ``None``: vLLM's own default on a GPU, where both are on;
    ``True`` on a CPU, where compiling takes minutes at every first start."""
    seed: int = 0
    state_path: str | None = None
    """File of learned corrections to start with, if it exists. One of another model or policy stops the start."""
    save_state_on_close: bool = False
    """Write what was learned to ``state_path`` when the engine is closed."""

    @model_validator(mode="after")
    def _check_state(self) -> EngineConfig:
        if self.state_path is not None and self.base_url is not None:
            raise ValueError(
                f"state_path={self.state_path!r} is for an engine in this process; for a server use kvcomm state load"
            )
        if self.save_state_on_close and self.state_path is None:
            raise ValueError("save_state_on_close needs state_path, the file to write")
        return self

    def key(self) -> str:
        """A string equal for equal configurations, used to share engines."""
        secret = self.api_key.get_secret_value() if self.api_key is not None else ""
        return self.model_dump_json() + hashlib.sha256(secret.encode()).hexdigest()
