"""From OpenAI's ``response_format``, or a pydantic class, to the constraint that is enforced while tokens are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from pydantic import BaseModel

from kvcomm_integrations.errors import ConfigurationError


def to_constraint(asked: Any) -> dict[str, Any] | None:
    """vLLM's form of a ``response_format``; ``None`` if any text will do.

    Raises:
        ConfigurationError: it is neither of OpenAI's forms nor a pydantic class.
    """
    if asked is None:
        return None
    if is_pydantic_class(asked):
        return {"json": asked.model_json_schema()}
    if isinstance(asked, Mapping):
        match asked.get("type"), asked.get("json_schema"):
            case "text", _:
                return None
            case "json_object", _:
                return {"json_object": True}
            case "json_schema", {"schema": Mapping() as schema}:
                return {"json": dict(schema)}
    raise ConfigurationError(
        f"response_format {asked!r} is not understood; use a pydantic class, "
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}} or {"type": "json_object"}'
    )


def is_pydantic_class(value: Any) -> TypeGuard[type[BaseModel]]:
    """Whether a value is a pydantic class rather than an object or another type."""
    return isinstance(value, type) and issubclass(value, BaseModel)
