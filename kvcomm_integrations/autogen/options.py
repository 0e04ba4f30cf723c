"""What an answer must follow: ``json_output`` if it says anything, else what the call's arguments hold."""

from __future__ import annotations

from typing import Any

from autogen_core.models import ModelInfo
from pydantic import BaseModel

from kvcomm_integrations.autogen.client_config import CreateArguments
from kvcomm_integrations.chat.response_format import is_pydantic_class, to_constraint
from kvcomm_integrations.errors import ConfigurationError

JsonOutput = bool | type[BaseModel] | None


def constraint_of(arguments: CreateArguments, json_output: JsonOutput, info: ModelInfo) -> dict[str, Any] | None:
    """The constraint on the answer, in vLLM's form.

    Raises:
        ConfigurationError: ``json_output`` is neither a bool nor a pydantic class, or the model is said not to do it.
    """
    if json_output is None and arguments.structured_outputs is not None:
        return arguments.constraint()
    constraint = to_constraint(arguments.response_format if json_output is None else _response_format(json_output))
    if constraint is None:
        return None
    ability = "json_output" if constraint.get("json_object") else "structured_output"
    if info.get(ability) is False:
        raise ConfigurationError(
            f"model_info says {ability}=False, so the answer cannot be forced into JSON; drop the override"
        )
    return constraint


def _response_format(json_output: bool | type[BaseModel]) -> Any:
    if isinstance(json_output, bool):
        return {"type": "json_object"} if json_output else None
    if not is_pydantic_class(json_output):
        raise ConfigurationError(f"json_output must be a bool or a pydantic class, got {json_output!r}")
    return json_output
