"""What the client says about its model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from autogen_core.models import ModelFamily, ModelInfo, validate_model_info

from kvcomm_integrations.errors import ConfigurationError

_FAMILIES = (
    (r"\br1\b", ModelFamily.R1),
    (r"llama-?3\.3-?8b", ModelFamily.LLAMA_3_3_8B),
    (r"llama-?3\.3-?70b", ModelFamily.LLAMA_3_3_70B),
    (r"llama-?4-?scout", ModelFamily.LLAMA_4_SCOUT),
    (r"llama-?4-?maverick", ModelFamily.LLAMA_4_MAVERICK),
    (r"mamba-?codestral", ModelFamily.OPEN_CODESRAL_MAMBA),
    (r"codestral", ModelFamily.CODESRAL),
    (r"ministral", ModelFamily.MINISTRAL),
    (r"mistral|mixtral", ModelFamily.MISTRAL),
)
"""Patterns in a model's name, lower case, and the family AutoGen knows it by; first match counts."""


def family_of(model: str) -> str:
    """AutoGen's name for a model's family, told by the last part of its name; ``unknown`` for most local models."""
    name = model.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    return next((str(family) for pattern, family in _FAMILIES if re.search(pattern, name)), ModelFamily.UNKNOWN)


def model_info(model: str, overrides: Mapping[str, Any] | None = None) -> ModelInfo:
    """What a local text model can do here. Reads no file and starts nothing.

    Calls and JSON are enforced while tokens are drawn, so every model can do both. Several system messages are always
    taken: those a chat template cannot show are merged.

    Raises:
        ConfigurationError: ``vision`` is claimed, which the engine cannot serve.
    """
    info: dict[str, Any] = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
        "family": family_of(model),
        "multiple_system_messages": True,
        **(overrides or {}),
    }
    if info["vision"]:
        raise ConfigurationError("model_info says vision=True, but images are not supported; set it to False")
    checked = cast(ModelInfo, info)
    validate_model_info(checked)
    return checked
