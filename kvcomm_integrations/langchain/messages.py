"""Conversions between LangChain messages and chat messages, one function per direction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages import ChatMessage as RoleMessage
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk

from kvcomm_integrations.chat.chunks import (
    CallChunk,
    Chunk,
    FinalChunk,
    InvalidCallChunk,
    ReasoningChunk,
    TextChunk,
    Usage,
)
from kvcomm_integrations.engines.interface import TokenLogprob
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.langchain.calls import INVALID_KEY, METADATA_KEY, described, refused_by_core, spoiling
from kvcomm_integrations.prompts.chat_message import ChatMessage
from kvcomm_integrations.wire import TREATMENTS

PROVIDER = "kvcomm"
_TEXT_BLOCKS = ("text", "text-plain", "input_text", "output_text", "refusal")
_CALL_BLOCKS = ("tool_call", "tool_call_chunk", "tool_use", "invalid_tool_call", "function_call", "input_json_delta")
_REASONING_BLOCKS = ("reasoning", "thinking", "reasoning_content")


def to_chat_messages(messages: Sequence[BaseMessage]) -> list[ChatMessage]:
    """LangChain messages as chat messages; tool results get the name of the call they answer.

    Raises:
        ConfigurationError: content that a text model cannot read.
    """
    names: dict[str, str] = {}
    converted = []
    for message in messages:
        if isinstance(message, AIMessage):
            names.update({call["id"]: call["name"] for call in message.tool_calls if call["id"]})
        converted.append(_to_chat_message(message, names))
    return converted


def _to_chat_message(message: BaseMessage, names: Mapping[str, str]) -> ChatMessage:
    text, reasoning = _content(message)
    name, segment_id = message.name, _segment_id(message)
    match message:
        case AIMessage():
            said = (message.additional_kwargs.get(key) for key in ("reasoning_content", "reasoning"))
            reasoning = reasoning or next((text for text in said if text and isinstance(text, str)), "")
            calls = tuple(_calls(message))
            return ChatMessage("assistant", text, name, calls, reasoning=reasoning or None, segment_id=segment_id)
        case ToolMessage(tool_call_id=call_id):
            return ChatMessage("tool", text, name or names.get(call_id), tool_call_id=call_id)
        case FunctionMessage():
            return ChatMessage("tool", text, name)
        case SystemMessage():
            return ChatMessage("system", text, name, segment_id=segment_id)
        case HumanMessage():
            return ChatMessage("user", text, name, segment_id=segment_id)
        case RoleMessage(role=role):
            return ChatMessage(role, text, name, segment_id=segment_id)
    raise ConfigurationError(
        f"a {type(message).__name__} cannot be sent to the model; use system, human, AI or tool messages"
    )


def _content(message: BaseMessage) -> tuple[str, str]:
    """Text and reasoning of a message. Text blocks are joined as they are: a separator would be new text."""
    if isinstance(message.content, str):
        return message.content, ""
    text, reasoning = [], []
    for part in message.content:
        block = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = block.get("type", "text" if "text" in block else None)
        if kind in _TEXT_BLOCKS:
            text.append(str(block.get("text") or block.get("refusal") or ""))
        elif kind in _REASONING_BLOCKS:
            reasoning.append(str(block.get("reasoning") or block.get("thinking") or ""))
        elif kind not in _CALL_BLOCKS:
            raise ConfigurationError(
                f"a {message.type} message has a content block of type {kind!r}, which a text model cannot read; "
                "send text blocks only"
            )
    return "".join(text), "".join(reasoning)


def _calls(message: AIMessage) -> Iterator[dict[str, Any]]:
    """Calls in OpenAI form with parsed arguments; a call that could not be parsed keeps its raw text."""
    for call in message.tool_calls:
        yield _call(call["id"], call["name"], call["args"])
    for invalid in message.invalid_tool_calls:
        yield _call(invalid["id"], invalid["name"], invalid["args"] or "")


def _call(call_id: str | None, name: str | None, arguments: Any) -> dict[str, Any]:
    return {"id": call_id or "", "type": "function", "function": {"name": name or "", "arguments": arguments}}


def _segment_id(message: BaseMessage) -> str | None:
    ours = message.response_metadata.get(METADATA_KEY)
    found = ours.get("segment_id") if isinstance(ours, Mapping) else None
    return found if isinstance(found, str) else None


def to_generation_chunk(chunk: Chunk, *, model_name: str, blocks: bool = False) -> ChatGenerationChunk:
    """A chunk in LangChain's form. Only the last one carries metadata: repeated strings would concatenate on merging.

    Args:
        chunk: From the chat runtime.
        model_name: Goes into the last chunk's metadata.
        blocks: The chunk will be turned into standard content blocks. Those are merged by index, and an index that
            only counts calls would merge the first call with the first text.
    """
    if isinstance(chunk, TextChunk):
        return ChatGenerationChunk(message=AIMessageChunk(content=chunk.text))
    if isinstance(chunk, ReasoningChunk):
        kwargs = {"reasoning_content": chunk.text}
        return ChatGenerationChunk(message=AIMessageChunk(content="", additional_kwargs=kwargs))
    if isinstance(chunk, InvalidCallChunk):
        chunk = CallChunk(chunk.index, arguments="" if refused_by_core(chunk) else spoiling(chunk))
    if isinstance(chunk, CallChunk):
        return ChatGenerationChunk(message=_call_message(chunk, blocks))
    return _last_chunk(chunk, model_name)


def _call_message(chunk: CallChunk, blocks: bool) -> AIMessageChunk:
    call = tool_call_chunk(name=chunk.name, args=chunk.arguments, id=chunk.id, index=chunk.index)
    if not blocks:
        return AIMessageChunk(content="", tool_call_chunks=[call])
    block = {**call, "index": f"lc_tc_{chunk.index}"}
    return AIMessageChunk(content=[block], tool_call_chunks=[call], response_metadata={"output_version": "v1"})


def _last_chunk(chunk: FinalChunk, model_name: str) -> ChatGenerationChunk:
    ours: dict[str, Any] = {"segment_id": chunk.segment_id, "request": chunk.number, **_counts(chunk.usage)}
    if chunk.report is not None:
        ours |= {"agent": chunk.report.agent} | ({"reason": chunk.report.reason} if chunk.report.reason else {})
    if chunk.ttft_ms is not None:
        ours["ttft_ms"] = chunk.ttft_ms
    if chunk.invalid_calls:
        ours[INVALID_KEY] = described(chunk.invalid_calls)
    metadata: dict[str, Any] = {
        "model_name": model_name,
        "model_provider": PROVIDER,
        "finish_reason": chunk.finish_reason,
        METADATA_KEY: ours,
    }
    if chunk.stop_reason is not None:
        metadata["stop_reason"] = chunk.stop_reason
    if chunk.logprobs:
        metadata["logprobs"] = {"content": [_logprob(entry) for entry in chunk.logprobs]}
    message = AIMessageChunk(
        content="", usage_metadata=to_usage(chunk.usage), response_metadata=metadata, chunk_position="last"
    )
    return ChatGenerationChunk(message=message, generation_info={"finish_reason": chunk.finish_reason})


def _counts(usage: Usage) -> dict[str, int]:
    """What became of the prompt's tokens. A message is kept as long as its thread, so it holds no more than that."""
    known = {name: getattr(usage, name) for name in TREATMENTS[:-1]}
    return {**known, TREATMENTS[-1]: max(0, usage.prompt_tokens - sum(known.values()))}


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    top = [{"token": token, "logprob": logprob} for _, token, logprob in entry.top]
    return {"token": entry.token, "logprob": entry.logprob, "top_logprobs": top}


def to_usage(usage: Usage) -> UsageMetadata:
    """Usage in LangChain's form. Details are disjoint parts of ``input_tokens``: readers subtract each of them."""
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cache_read),
        output_token_details=OutputTokenDetails(reasoning=usage.reasoning_tokens),
    )
