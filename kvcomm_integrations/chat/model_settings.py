"""The settings that both framework adapters have, what one call may change, and what the chat runtime is given.

``ModelSettings`` is the base of both adapters' settings. ``call_arguments`` puts one call's over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvcomm_integrations.chat.caller import Caller
from kvcomm_integrations.chat.detect import named_tool_format
from kvcomm_integrations.chat.response_format import to_constraint
from kvcomm_integrations.chat.tool_format import ToolFormat
from kvcomm_integrations.config import EngineConfig, EngineSettings
from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.ids import DEFAULT_TENANT
from kvcomm_integrations.wire import Mode

M = TypeVar("M", bound=BaseModel)
C = TypeVar("C", bound="CallArguments")


class ReuseArguments(BaseModel):
    """Who asks, and how reuse treats the request. ``None`` leaves a field to the next in line."""

    model_config = ConfigDict(extra="forbid")

    agent: str | None = None
    """Who answers; ``None``: the agent that the framework is running."""
    session: str | None = None
    """Whose shared contents may be reused; ``None``: the framework's thread, run, team or scope."""
    tenant: str | None = None
    """Users of different tenants share nothing. Set it from a trusted place."""
    mode: Mode | None = None
    """``auto`` reuses, ``observe`` computes densely but learns, ``dense`` does neither."""
    policy: str | None = None
    """Correction policy; ``None``: the engine's."""


class SamplingSettings(BaseModel):
    """How an answer is drawn: settings that one call may override under the same name."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: int | None = Field(default=None, ge=1)
    """Longest answer, tokens; ``None``: until the context is full."""
    temperature: float | None = Field(default=None, ge=0)
    """0 is greedy; ``None``: the engine's default."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together have this probability, above 0 to 1."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens; 0 or -1: from all."""
    min_p: float | None = None
    """Draw from tokens at least this probable, as a share of the likeliest one's probability, 0 to 1."""
    seed: int | None = None
    """Makes sampling repeatable."""
    presence_penalty: float | None = None
    """Subtracted from the logit of a token that the answer has already, -2 to 2."""
    frequency_penalty: float | None = None
    """The same for each time that the answer has it, -2 to 2."""
    repetition_penalty: float | None = None
    """Above 1 makes tokens of the prompt and the answer less likely, below 1 more."""
    stop: list[str] | None = None
    """Strings that end the answer; they are not part of it. One string will do."""
    logprobs: bool | int | None = None
    """Return log-probabilities: ``True``, or how many alternatives per token."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds one answer may take."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the chat template, such as ``enable_thinking``."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class SamplingArguments(SamplingSettings):
    """The settings that are mostly of use to single calls."""

    logit_bias: dict[int, float] | None = None
    """Token id to what is added to its logit."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the answer."""
    ignore_eos: bool = False
    """Go on after the token that ends an answer."""
    min_tokens: int = Field(default=0, ge=0)
    """Tokens before the answer may end."""
    top_logprobs: int | None = Field(default=None, ge=0)
    """Alternatives per token, the way OpenAI's API names them; needs ``logprobs``."""
    parallel_tool_calls: bool = True
    """Allow more than one tool call in one answer. Switch it off where a tool runs an agent."""


class CallArguments(SamplingArguments):
    """What one call may set in either framework."""

    model_config = ConfigDict(frozen=True)

    response_format: Any = None
    """OpenAI's form, or a pydantic class."""
    structured_outputs: dict[str, Any] | None = None
    """vLLM's form: ``{"regex": ...}``, ``{"choice": [...]}``, ``{"grammar": ...}``, ``{"json": schema}``."""
    kvcomm: ReuseArguments = Field(default_factory=ReuseArguments)
    """Who asks, and how reuse treats this one request."""

    def constraint(self) -> dict[str, Any] | None:
        """What the answer must follow, in vLLM's form.

        Raises:
            ConfigurationError: ``response_format`` is not understood.
        """
        return to_constraint(self.response_format) if self.structured_outputs is None else self.structured_outputs

    def sampling(self, constraint: dict[str, Any] | None) -> SamplingOptions:
        """How this call's tokens are drawn."""
        same = {field.name for field in fields(SamplingOptions)} & set(SamplingArguments.model_fields)
        options = {name: getattr(self, name) for name in same}
        options |= {name: tuple(options[name] or ()) for name in ("stop", "stop_token_ids")}
        if self.logprobs is None or self.logprobs is False:
            options["logprobs"] = None
        else:
            options["logprobs"] = int(self.logprobs) if self.top_logprobs is None else self.top_logprobs
        return SamplingOptions(**options, structured_output=constraint)

    def for_runtime(self, caller: Caller, constraint: dict[str, Any] | None) -> dict[str, Any]:
        """Arguments of ``ChatRuntime.prepare``: all but messages, tools and how the model writes calls."""
        return {
            **dict(self.kvcomm),
            **asdict(caller),
            "parallel_tool_calls": self.parallel_tool_calls,
            "template_kwargs": self.chat_template_kwargs,
            "sampling": self.sampling(constraint),
        }


class ModelSettings(EngineSettings, SamplingSettings, ReuseArguments):
    """What both adapters are made of."""

    max_retries: int = Field(default=2, ge=0)
    """Tries after an engine error that came before the first token."""
    tool_parser: str | None = None
    """How the model writes tool calls, by the name of vLLM's parser; ``None``: told by its chat template."""
    reasoning_parser: str | None = None
    """How the model writes its thinking, by the name of vLLM's parser; ``None``: told by its chat template."""


def engine_config_of(settings: EngineSettings) -> EngineConfig:
    """The configuration by which models with equal settings share one engine."""
    return EngineConfig(**{name: getattr(settings, name) for name in EngineSettings.model_fields})


def tool_format_of(settings: ModelSettings) -> ToolFormat | None:
    """How the model writes calls and thinking, if the settings name a parser; ``None``: see its chat template."""
    if settings.tool_parser or settings.reasoning_parser:
        return named_tool_format(settings.tool_parser, settings.reasoning_parser)
    return None


def call_arguments(settings: ModelSettings, kind: type[C], given: Mapping[str, Any], what: str) -> C:
    """One call's arguments put over the model's own settings; ``kvcomm`` has its tenant and mode in any case.

    Args:
        settings: The model's.
        kind: The adapter's class of arguments.
        given: What the call sets.
        what: Name of ``given`` in errors.

    Raises:
        ConfigurationError: an unknown name, or a value that cannot work.
    """
    own = {name: getattr(settings, name) for name in kind.model_fields if name in type(settings).model_fields}
    call = checked(kind, {**own, **given}, what)
    defaults = {"tenant": DEFAULT_TENANT, "mode": Mode.AUTO}
    merged: dict[str, Any] = {
        name: getattr(call.kvcomm, name) or getattr(settings, name) or defaults.get(name)
        for name in ReuseArguments.model_fields
    }
    return call.model_copy(update={"kvcomm": ReuseArguments(**merged)})


def checked(kind: type[M], values: Mapping[str, Any], what: str) -> M:
    """A settings object, with our error in place of pydantic's.

    Raises:
        ConfigurationError: names every offending setting, and the known ones if one is unknown.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as err:
        found = err.errors(include_url=False)
        unknown = [error["loc"] for error in found if error["type"] == "extra_forbidden"]
        names = (ReuseArguments if all(loc[0] == "kvcomm" for loc in unknown) else kind).model_fields
        known = f"; known are {', '.join(names)}" if unknown else ""
        raise ConfigurationError(f"{what} are not valid: {'; '.join(map(_described, found))}{known}") from err


def _described(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors in a line. Shows no value that may be a secret: of the key, or of an unknown name."""
    name = ".".join(map(str, error["loc"])) or "settings"
    if error["type"] == "extra_forbidden":
        return f"{name} is unknown"
    value = "" if name == "api_key" else f"={error.get('input')!r}"
    return f"{name}{value}: {error['msg']}"
