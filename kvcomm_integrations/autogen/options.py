"""Turns one call's arguments into sampling options. Knows settings and what the model can do; no messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from autogen_core.models import ModelInfo
from pydantic import BaseModel

from kvcomm_integrations.autogen.client_config import CreateArguments
from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.errors import ConfigurationError

JsonOutput = bool | type[BaseModel] | None

_SAME_NAME = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "ignore_eos", "min_tokens",
)  # fmt: skip


def sampling_options(arguments: CreateArguments, json_output: JsonOutput, info: ModelInfo) -> SamplingOptions:
    """How this call's tokens are drawn.

    Raises:
        ConfigurationError: ``json_output`` is neither a bool nor a pydantic class, or the model is said not to do it.
    """
    return SamplingOptions(
        **{name: getattr(arguments, name) for name in _SAME_NAME},
        stop=tuple(arguments.stop or ()),
        stop_token_ids=tuple(arguments.stop_token_ids or ()),
        logprobs=_logprobs(arguments),
        structured_output=_structured_output(arguments, json_output, info),
    )


def _logprobs(arguments: CreateArguments) -> int | None:
    if arguments.logprobs is None or arguments.logprobs is False:
        return None
    return arguments.top_logprobs if arguments.top_logprobs is not None else int(arguments.logprobs)


def _structured_output(arguments: CreateArguments, json_output: JsonOutput, info: ModelInfo) -> dict[str, Any] | None:
    """The constraint on the answer: ``json_output`` if it says anything, else what the arguments hold."""
    if json_output is True:
        return _checked({"json_object": True}, info)
    if json_output is False:
        return None
    if _is_model(json_output):
        return _checked({"json": json_output.model_json_schema()}, info)
    if json_output is not None:
        raise ConfigurationError(f"json_output must be a bool or a pydantic class, got {json_output!r}")
    if arguments.structured_outputs is not None:
        return dict(arguments.structured_outputs)
    return _checked(_from_response_format(arguments.response_format), info)


def _from_response_format(asked: Any) -> dict[str, Any] | None:
    if asked is None:
        return None
    if _is_model(asked):
        return {"json": asked.model_json_schema()}
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    described = asked.get("json_schema") if kind == "json_schema" else None
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if isinstance(schema, Mapping):
        return {"json": dict(schema)}
    raise ConfigurationError(
        f"response_format {asked!r} is not understood; use json_output, a pydantic class, "
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}} or {"type": "json_object"}'
    )


def _checked(constraint: dict[str, Any] | None, info: ModelInfo) -> dict[str, Any] | None:
    """``constraint``, if the model is said to do it."""
    if constraint is None:
        return None
    ability = "json_output" if constraint.get("json_object") else "structured_output"
    if info.get(ability) is False:
        raise ConfigurationError(
            f"model_info says {ability}=False, so the answer cannot be forced into JSON; drop the override"
        )
    return constraint


def _is_model(value: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(value, type) and issubclass(value, BaseModel)
