"""The client's settings as pydantic models: what a component config holds, and what one call may set.

Knows no messages, no engine. Everything here can be written as JSON or YAML; secrets are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_serializer, field_validator

from kvcomm_integrations.chat.runtime import DEFAULT_TENANT
from kvcomm_integrations.config import (
    EngineConfig,
    HttpConfig,
    ReuseConfig,
    Tokenization,
    api_key_from_environment,
)
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.wire import Mode

M = TypeVar("M", bound=BaseModel)


class SamplingArguments(BaseModel):
    """How an answer is drawn: settings of the client that one call may override under the same name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: int | None = Field(default=None, ge=1)
    """Longest answer, tokens; ``None``: until the context is full."""
    temperature: float | None = Field(default=None, ge=0)
    """0 is greedy; ``None``: the engine's default."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    """Makes sampling repeatable."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    """Token id to what is added to its logit."""
    stop: list[str] | None = None
    """Strings that end the answer; they are not part of it. One string will do."""
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    logprobs: bool | int | None = None
    """Return log-probabilities: ``True``, or how many alternatives per token."""
    top_logprobs: int | None = Field(default=None, ge=0)
    """Alternatives per token, the way OpenAI's API names them; needs ``logprobs``."""
    parallel_tool_calls: bool = True
    """Allow more than one tool call in one answer. Switch it off where an ``AgentTool`` is used."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds one answer may take."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the chat template, such as ``enable_thinking``."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class ReuseArguments(BaseModel):
    """Who asks, and how reuse treats the request. ``None`` leaves a field to the next in line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    agent: str | None = None
    """Who answers; ``None``: found from AutoGen's runtime."""
    session: str | None = None
    """Whose shared contents may be reused; ``None``: the team, or the ``session_scope`` around the call."""
    tenant: str | None = None
    """Users of different tenants share nothing. Set it from a trusted place."""
    mode: Mode | None = None
    """``auto`` reuses, ``observe`` computes densely but learns, ``dense`` does neither."""
    policy: str | None = None
    """Correction policy; ``None``: the engine's."""

    @field_serializer("mode")
    def _plain_mode(self, value: Mode | None) -> str | None:
        return None if value is None else value.value


class CreateArguments(SamplingArguments):
    """Everything ``extra_create_args`` may hold."""

    response_format: Any = None
    """OpenAI's form, or a pydantic class. ``json_output`` wins over it."""
    structured_outputs: dict[str, Any] | None = None
    """vLLM's form: ``{"regex": ...}``, ``{"choice": [...]}``, ``{"grammar": ...}``, ``{"json": schema}``."""
    kvcomm: ReuseArguments = Field(default_factory=ReuseArguments)
    """Who asks, and how reuse treats this one request."""
    stream_options: dict[str, Any] | None = None
    """Taken for compatibility and not needed: streams always end with the usage."""


class KVCommClientConfig(SamplingArguments, ReuseArguments):
    """What ``KVCommChatCompletionClient`` is made of, and what its component config holds.

    The server's key is not part of what is written: it is read from ``KVCOMM_API_KEY`` again when a config is loaded.
    """

    model: str = Field(min_length=1)
    """Folder with weights and tokenizer, or a hub id."""
    base_url: str | None = None
    """A vLLM server's ``.../v1`` address; ``None`` runs the engine in this process."""
    api_key: SecretStr | None = Field(default_factory=api_key_from_environment, exclude=True, repr=False)
    """The server's key; read from ``KVCOMM_API_KEY`` if not given, and never written."""
    http: HttpConfig = Field(default_factory=HttpConfig)
    """Timeouts, retries and TLS of the server's connections; a dict of its fields will do."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; ``None``: the model's."""
    max_retries: int = Field(default=2, ge=0)
    """Tries after an engine error that came before the first token."""
    model_info: dict[str, Any] | None = None
    """Overrides of what the client says about its model (``ModelInfo``), field by field."""
    add_name_prefixes: bool = False
    """Put ``<name> said:`` before what users and other agents have said. Most chat templates show no names."""

    reuse: ReuseConfig = Field(default_factory=ReuseConfig)
    """How KV is reused; a dict of its fields will do."""
    dtype: str = "auto"
    """Weights and cache type; ``auto`` is float32 on a CPU and the model's own type elsewhere."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Longest prompt plus answer, tokens; ``None``: the model's own."""
    block_size: int | None = None
    """Paged-cache block, tokens; ``None``: vLLM's choice."""
    tokenization: Tokenization = Tokenization.SEGMENTED
    """How contents are tokenised, see ``Tokenization``."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """More of vLLM's ``AsyncEngineArgs``."""
    tool_parser: str | None = None
    """How the model writes tool calls, by the name of vLLM's parser; ``None``: told by its chat template."""
    reasoning_parser: str | None = None
    """How the model writes its thinking, by the name of vLLM's parser; ``None``: told by its chat template."""

    @field_serializer("tokenization")
    def _plain_tokenization(self, value: Tokenization) -> str:
        return value.value

    @field_serializer("reuse")
    def _plain_reuse(self, value: ReuseConfig) -> dict[str, Any]:
        return value.model_dump(mode="json", exclude_defaults=True)

    @field_serializer("http")
    def _plain_http(self, value: HttpConfig) -> dict[str, Any]:
        return value.model_dump(mode="json", exclude_defaults=True)

    def engine_config(self) -> EngineConfig:
        """The settings that identify the client's engine."""
        return EngineConfig(
            model=self.model,
            base_url=self.base_url,
            api_key=self.api_key,
            http=self.http,
            tokenizer=self.tokenizer,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            reuse=self.reuse,
            tokenization=self.tokenization,
            engine_args=self.engine_args,
        )

    def reuse_arguments(self, call: ReuseArguments) -> ReuseArguments:
        """The client's own with the call's put over them, and defaults for what neither says."""
        merged = {name: getattr(call, name) or getattr(self, name) for name in ReuseArguments.model_fields}
        merged["tenant"] = merged["tenant"] or DEFAULT_TENANT
        merged["mode"] = merged["mode"] or Mode.AUTO
        return ReuseArguments(**merged)

    def create_arguments(self, extra: Mapping[str, Any]) -> CreateArguments:
        """The client's own with one call's ``extra_create_args`` put over them.

        Raises:
            ConfigurationError: an unknown name, or a value that cannot work.
        """
        own = {name: getattr(self, name) for name in SamplingArguments.model_fields}
        return checked(CreateArguments, {**own, **extra}, "extra_create_args")


def checked(kind: type[M], values: Mapping[str, Any], what: str) -> M:
    """A settings object, with our error in place of pydantic's.

    Raises:
        ConfigurationError: names every offending setting, and the known ones if one is unknown.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as err:
        found = err.errors(include_url=False)
        unknown = any(error["type"] == "extra_forbidden" for error in found)
        known = f"; known are {', '.join(kind.model_fields)}" if unknown else ""
        raise ConfigurationError(f"{what} are not valid: {'; '.join(map(_described, found))}{known}") from err


def _described(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors in a line. Shows no value that may be a secret: of the key, or of an unknown name."""
    name = ".".join(map(str, error["loc"])) or "settings"
    if error["type"] == "extra_forbidden":
        return f"{name} is unknown"
    value = "" if name == "api_key" else f"={error.get('input')!r}"
    return f"{name}{value}: {error['msg']}"
