"""Tool calls of a whole answer. Chunks merge into calls that may be cut off; a whole answer must not run those."""

from __future__ import annotations

import json

from langchain_core.messages import AIMessage, InvalidToolCall, ToolCall
from langchain_core.outputs import ChatResult

from kvcomm_integrations.chat.chunks import CallChunk, Chunk, FinalChunk


class Calls:
    """Notes the calls of one answer as they come, and puts them into its message in the end."""

    def __init__(self) -> None:
        self._parts: dict[int, list[CallChunk]] = {}
        self._cut = False

    def note(self, piece: Chunk) -> Chunk:
        """Remember a piece if it is of a call or says that the answer was cut off, and return it."""
        if isinstance(piece, CallChunk):
            self._parts.setdefault(piece.index, []).append(piece)
        elif isinstance(piece, FinalChunk):
            self._cut = piece.finish_reason == "length"
        return piece

    def settle(self, result: ChatResult) -> ChatResult:
        """Call what is whole; what is no JSON object (an answer cut off in it, for one) becomes an invalid call."""
        message = result.generations[0].message
        if not self._parts or not isinstance(message, AIMessage):
            return result
        message.tool_calls, message.invalid_tool_calls = [], []
        for parts in self._parts.values():
            name = next((part.name for part in parts if part.name), "")
            call_id = next((part.id for part in parts if part.id), None)
            text = "".join(part.arguments for part in parts)
            if not text and not self._cut:  # a call without arguments
                text = "{}"
            try:
                arguments = json.loads(text, strict=False)
            except ValueError as error:
                arguments, reason = None, str(error)
            else:
                reason = f"arguments must be a JSON object, not {type(arguments).__name__}"
            if isinstance(arguments, dict):
                message.tool_calls.append(ToolCall(name=name, args=arguments, id=call_id, type="tool_call"))
            else:
                message.invalid_tool_calls.append(
                    InvalidToolCall(name=name, args=text, id=call_id, error=reason, type="invalid_tool_call")
                )
        return result
