"""Reports calls on AutoGen's event logger, with what was reused.

A call that is not streamed is one ``LLMCallEvent``, a stream an ``LLMStreamStartEvent`` and an ``LLMStreamEndEvent``.
Beside AutoGen's own fields they carry ``model``, ``agent`` and ``session``; a call's last event also ``ttft_ms`` and
``kvcomm``: token counts (``exact``, ``loaded``, ``repaired``, ``computed``), and per segment the source, confidence and
reason.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autogen_core import EVENT_LOGGER_NAME
from autogen_core.logging import LLMCallEvent, LLMStreamEndEvent, LLMStreamStartEvent
from autogen_core.models import CreateResult

from kvcomm_integrations.chat.caller import Caller
from kvcomm_integrations.chat.chunks import FinalChunk
from kvcomm_integrations.prompts.chat_message import ChatMessage

logger = logging.getLogger(EVENT_LOGGER_NAME)


@dataclass(frozen=True)
class CallEvents:
    """The events of one call. Nothing is put together unless the logger is listening."""

    messages: Sequence[ChatMessage]
    tools: Sequence[dict[str, Any]]
    model: str
    caller: Caller

    def call_ended(self, result: CreateResult, end: FinalChunk) -> None:
        """Report a finished call."""
        if logger.isEnabledFor(logging.INFO):
            logger.info(LLMCallEvent(**self._asked(), **self._answered(result, end), **self._who()))

    def stream_started(self) -> None:
        """Report that the first chunk of a stream has come."""
        if logger.isEnabledFor(logging.INFO):
            logger.info(LLMStreamStartEvent(**self._asked(), **self._who()))

    def stream_ended(self, result: CreateResult, end: FinalChunk) -> None:
        """Report a finished stream."""
        if logger.isEnabledFor(logging.INFO):
            logger.info(LLMStreamEndEvent(**self._answered(result, end), **self._who()))

    def _asked(self) -> dict[str, Any]:
        return {"messages": [message.to_dict() for message in self.messages], "tools": list(self.tools)}

    def _answered(self, result: CreateResult, end: FinalChunk) -> dict[str, Any]:
        return {
            "response": json.loads(result.model_dump_json()),  # events must be serialisable
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
            "ttft_ms": end.ttft_ms,
            "kvcomm": None if end.report is None else end.report.model_dump(mode="json"),
        }

    def _who(self) -> dict[str, Any]:
        return {"model": self.model, "agent": self.caller.agent, "session": self.caller.session}
