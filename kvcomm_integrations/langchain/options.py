"""Turns a model's fields and the keywords of one call into what the chat runtime takes. No messages, no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.wire import Mode

SAMPLING_FIELDS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Fields of the model that may also be given per call, under the same name."""
_CALL_ONLY = ("logit_bias", "stop_token_ids", "ignore_eos", "min_tokens")
_KVCOMM = ("agent", "session", "tenant", "mode", "policy")
_IGNORED = ("stream", "ls_structured_output_format", "structured_output_format", "ls_integration")
"""Keywords that LangChain itself passes down and that mean nothing here."""


@dataclass(frozen=True)
class CallOptions:
    """Everything one call may set."""

    sampling: SamplingOptions
    identity: Mapping[str, str | None]
    """Explicit ``agent`` and ``session``, ``None`` where not given."""
    tenant: str
    mode: Mode
    policy: str | None
    timeout: float | None
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | bool | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    strict: bool | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def call_options(fields: Mapping[str, Any], stop: Sequence[str] | None, kwargs: Mapping[str, Any]) -> CallOptions:
    """Merge a model's fields with one call's keywords; the call wins.

    Args:
        fields: The model's fields by name.
        stop: Stop strings of the call; ``None`` uses the model's.
        kwargs: The call's keywords, bound ones included.

    Raises:
        ConfigurationError: an unknown keyword, or one with a value that cannot work.
    """
    left = {key: value for key, value in kwargs.items() if key not in _IGNORED}
    ours = dict(left.pop("kvcomm", None) or {})
    _reject_unknown("kvcomm", ours, _KVCOMM)
    sampling = {name: left.pop(name, fields[name]) for name in SAMPLING_FIELDS}
    sampling |= {name: left.pop(name) for name in _CALL_ONLY if name in left}
    if "stop_token_ids" in sampling:
        sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    stops = stop if stop is not None else fields["stop"]
    options = CallOptions(
        sampling=SamplingOptions(
            **sampling,
            stop=tuple([stops] if isinstance(stops, str) else stops or ()),
            logprobs=_logprobs(left.pop("logprobs", fields["logprobs"]), left.pop("top_logprobs", None)),
            structured_output=_structured_output(left),
        ),
        identity={key: ours.get(key) or fields[key] for key in ("agent", "session")},
        tenant=ours.get("tenant") or fields["tenant"],
        mode=_mode(ours.get("mode") or left.pop("mode", None) or fields["mode"]),
        policy=ours.get("policy") or left.pop("policy", None) or fields["policy"],
        timeout=left.pop("timeout", fields["timeout"]),
        tools=left.pop("tools", None),
        tool_choice=left.pop("tool_choice", None),
        parallel_tool_calls=left.pop("parallel_tool_calls", None) is not False,
        strict=left.pop("strict", None),
        template_kwargs={**(fields["chat_template_kwargs"] or {}), **(left.pop("chat_template_kwargs", None) or {})},
    )
    _reject_unknown("call", left, ())
    return options


def _reject_unknown(what: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        allowed = known or (*SAMPLING_FIELDS, *_CALL_ONLY, "stop", "logprobs", "timeout", "tools", "tool_choice",
                            "response_format", "structured_outputs", "chat_template_kwargs", "kvcomm")  # fmt: skip
        raise ConfigurationError(f"unknown {what} keywords: {', '.join(unknown)}; known are {', '.join(allowed)}")


def _mode(value: Any) -> Mode:
    try:
        return Mode(value)
    except ValueError as err:
        raise ConfigurationError(f"mode={value!r} is unknown; use one of {', '.join(Mode)}") from err


def _logprobs(value: bool | int | None, top: int | None) -> int | None:
    if value is None or value is False:
        return None
    return top if top is not None else int(value)


def _structured_output(left: dict[str, Any]) -> dict[str, Any] | None:
    """Take ``response_format`` (OpenAI's form) or ``structured_outputs`` (vLLM's) out of the keywords."""
    direct = left.pop("structured_outputs", None)
    asked = left.pop("response_format", None)
    if direct is not None:
        return dict(direct)
    if asked is None or asked.get("type") == "text":
        return None
    if asked.get("type") == "json_object":
        return {"json_object": True}
    if asked.get("type") == "json_schema" and isinstance(asked.get("json_schema"), Mapping):
        schema = asked["json_schema"].get("schema")
        if isinstance(schema, Mapping):
            return {"json": dict(schema)}
    raise ConfigurationError(
        f"response_format {asked!r} is not understood; use "
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}} or {"type": "json_object"}'
    )
