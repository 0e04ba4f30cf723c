"""Calls that must not be run, and answers that were not made just now, in LangChain's messages.

LangChain's core merges the fragments of a call and closes JSON that was left open, so a call that was cut off in a
stream would be run with what there was of its arguments. A last fragment that makes them unreadable prevents that.
"""

from __future__ import annotations

from langchain_core.messages import AIMessage, InvalidToolCall
from langchain_core.utils.json import parse_partial_json

from kvcomm_integrations.chat.chunks import InvalidCallChunk

METADATA_KEY = "kvcomm"
INVALID_KEY = "invalid_calls"


def refused_by_core(call: InvalidCallChunk) -> bool:
    """Whether core makes no object of what was handed out of a call, so that its arguments can stay as they are."""
    if call.cut or not call.arguments:
        return False
    try:
        return not isinstance(parse_partial_json(call.arguments), dict)
    except ValueError:
        return True


def spoiling(call: InvalidCallChunk) -> str:
    """What to append to a call's arguments so that no reader of partial JSON takes them for an object.

    It ends an open string, then closes a bracket that is not open, and says why.
    """
    open_brackets, in_string, escaped = [""], False, False
    for char in call.arguments:
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        elif char in "{[":
            open_brackets.append(char)
        elif char in "}]" and len(open_brackets) > 1:
            open_brackets.pop()
    quote = ('""' if escaped else '"') if in_string else ""
    wrong = "}" if open_brackets[-1] == "[" else "]"
    written = "" if call.written == call.arguments else f"; the model wrote: {call.written}"
    return f"{quote}{wrong} [not run: {call.error}{written}]"


def described(calls: tuple[InvalidCallChunk, ...]) -> list[InvalidToolCall]:
    """Invalid calls in LangChain's form, with the reason, which merging fragments would lose.

    Of a call that was cut off the arguments are as the model wrote them; else they are those of the merged fragments.
    """
    return [
        InvalidToolCall(
            type="invalid_tool_call",
            id=call.id,
            name=call.name,
            args=call.written if call.cut or refused_by_core(call) else call.arguments + spoiling(call),
            error=call.error,
        )
        for call in calls
    ]


def settle(message: AIMessage) -> AIMessage:
    """Put text and reason of the invalid calls into a whole message whose fragments have been merged."""
    ours = message.response_metadata.get(METADATA_KEY) or {}
    reasons = {call["id"]: call for call in ours.get(INVALID_KEY, ())}
    if reasons:
        message.invalid_tool_calls = [reasons.get(call["id"], call) for call in message.invalid_tool_calls]
    return message


def from_cache(message: AIMessage) -> bool:
    """Whether LangChain's cache has given this answer: it then says that it cost nothing."""
    return "total_cost" in (message.usage_metadata or {})


def as_cached(message: AIMessage) -> AIMessage:
    """A copy that says so, without what was reused when the answer was made; the message itself is the cache's."""
    ours = {"segment_id": (message.response_metadata.get(METADATA_KEY) or {}).get("segment_id"), "cached": True}
    return message.model_copy(update={"response_metadata": {**message.response_metadata, METADATA_KEY: ours}})
