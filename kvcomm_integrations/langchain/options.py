"""The keywords of one call of ``ChatKVComm``, put over the model's own settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcomm_integrations.chat.model_settings import CallArguments, ModelSettings, SamplingSettings, call_arguments

_IGNORED = ("stream", "ls_structured_output_format", "structured_output_format", "ls_integration")
"""Keywords that LangChain itself passes down and that mean nothing here."""


class CallKeywords(CallArguments):
    """Everything one call may set."""

    tools: Any = None
    """Definitions in OpenAI form."""
    tool_choice: Any = None
    """Any form that ``tool_use`` takes."""
    strict: bool | None = None
    """Arguments of tools must follow their schema even where calling is optional."""


_OPTIONAL = set(CallKeywords.model_fields) - set(SamplingSettings.model_fields)
"""Keywords that are not given if they are ``None``; the others then take back what the model says."""


def call_keywords(model: ModelSettings, stop: Sequence[str] | None, kwargs: Mapping[str, Any]) -> CallKeywords:
    """Merge a model's settings with one call's keywords; the call wins.

    Args:
        model: The chat model.
        stop: Stop strings of the call; ``None`` uses the model's.
        kwargs: The call's keywords, bound ones included.

    Raises:
        ConfigurationError: an unknown keyword, or one with a value that cannot work.
    """
    given = {k: v for k, v in kwargs.items() if k not in _IGNORED and not (v is None and k in _OPTIONAL)}
    beside = {key: given.pop(key) for key in ("mode", "policy") if key in given}
    given["kvcomm"] = {**beside, **dict(given.pop("kvcomm", None) or {})}
    given["chat_template_kwargs"] = {**(model.chat_template_kwargs or {}), **(given.get("chat_template_kwargs") or {})}
    if stop is not None:
        given["stop"] = stop
    return call_arguments(model, CallKeywords, given, "keywords of the call")
