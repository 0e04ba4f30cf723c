"""Reports calls on AutoGen's event logger, with what was reused. Knows messages and results; no engine.

A call that is not streamed is one ``LLMCallEvent``, a stream an ``LLMStreamStartEvent`` and an ``LLMStreamEndEvent``.
Beside AutoGen's own fields they carry ``model``, ``agent``, ``session``, ``ttft_ms`` and ``kvcomm``: token counts
(``exact``, ``loaded``, ``repaired``, ``computed``), and per segment the source, confidence and reason.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from autogen_core import EVENT_LOGGER_NAME
from autogen_core.logging import LLMCallEvent, LLMStreamEndEvent, LLMStreamStartEvent
from autogen_core.models import CreateResult

from kvcomm_integrations.autogen.identity import Identity
from kvcomm_integrations.chat.chunks import FinalChunk
from kvcomm_integrations.prompts.chat_message import ChatMessage

logger = logging.getLogger(EVENT_LOGGER_NAME)


def log_call(
    messages: Sequence[ChatMessage],
    tools: Sequence[dict[str, Any]],
    result: CreateResult,
    end: FinalChunk,
    *,
    model: str,
    who: Identity,
) -> None:
    """Report a finished call."""
    if logger.isEnabledFor(logging.INFO):
        event = LLMCallEvent(
            messages=[message.to_dict() for message in messages],
            response=_json(result),
            prompt_tokens=result.usage.prompt_tokens,
            completion_tokens=result.usage.completion_tokens,
            tools=list(tools),
            **_extra(end, model, who),
        )
        logger.info(event)


def log_stream_start(
    messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], *, model: str, who: Identity
) -> None:
    """Report that the first piece of a stream has come."""
    if logger.isEnabledFor(logging.INFO):
        event = LLMStreamStartEvent(
            messages=[message.to_dict() for message in messages],
            tools=list(tools),
            model=model,
            agent=who.agent,
            session=who.session,
        )
        logger.info(event)


def log_stream_end(result: CreateResult, end: FinalChunk, *, model: str, who: Identity) -> None:
    """Report a finished stream."""
    if logger.isEnabledFor(logging.INFO):
        event = LLMStreamEndEvent(
            response=_json(result),
            prompt_tokens=result.usage.prompt_tokens,
            completion_tokens=result.usage.completion_tokens,
            **_extra(end, model, who),
        )
        logger.info(event)


def _json(result: CreateResult) -> dict[str, Any]:
    """The result as plain JSON: events must be serializable."""
    plain: dict[str, Any] = json.loads(result.model_dump_json())
    return plain


def _extra(end: FinalChunk, model: str, who: Identity) -> dict[str, Any]:
    return {
        "model": model,
        "agent": who.agent,
        "session": who.session,
        "ttft_ms": end.ttft_ms,
        "kvcomm": None if end.report is None else end.report.model_dump(mode="json"),
    }
