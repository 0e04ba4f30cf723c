"""Chat messages, and turns: what a chat template sees as one message."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

SEPARATOR = "\n\n"
"""Stands between the contents of messages that had to be merged."""

SYSTEM_ROLES = frozenset({"system", "developer"})

_SURROGATE = re.compile("[\ud800-\udfff]")
_THINK_END = "</think>"


def clean_text(text: str) -> str:
    """``text`` without halves of surrogate pairs (what is left of an emoji cut in two): they become U+FFFD."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


@dataclass(frozen=True)
class ChatMessage:
    """One chat message, of any framework."""

    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    content: str = ""
    name: str | None = None
    """Who speaks (an agent), or the tool that answered."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """OpenAI form: ``{"id", "type": "function", "function": {"name", "arguments"}}``; arguments JSON text or object."""
    tool_call_id: str | None = None
    reasoning: str | None = None
    """Thinking that came before the content, if it is kept apart from it."""
    segment_id: str | None = None
    """``Content.id`` of the content this message carries, if it was generated or registered by us."""

    def to_dict(self, content: str | None = None) -> dict[str, Any]:
        """The form chat templates read, with ``content`` in place of the message's own if given."""
        out: dict[str, Any] = {"role": self.role, "content": self.content if content is None else content}
        if self.name:
            out["name"] = self.name
        if self.tool_calls:
            out["tool_calls"] = [dict(call) for call in self.tool_calls]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.reasoning is not None:
            out["reasoning_content"] = out["reasoning"] = self.reasoning
        return out

    def core(self) -> tuple[int, int]:
        """``[start, end)`` of the content proper: without surrounding whitespace and an assistant's thinking."""
        return core_span(self.content, thinking=self.role == "assistant")

    def cleaned(self) -> ChatMessage:
        """The message without halves of surrogate pairs, which no tokenizer takes."""
        return replace(self, **{part.name: deep_map(getattr(self, part.name), clean_text) for part in fields(self)})


def core_span(text: str, *, thinking: bool = False) -> tuple[int, int]:
    """``[start, end)`` of ``text`` without surrounding whitespace; empty if there is nothing else.

    Args:
        text: any text.
        thinking: leave out what precedes the last ``</think>``, too.
    """
    start = text.rindex(_THINK_END) + len(_THINK_END) if thinking and _THINK_END in text else 0
    end = len(text.rstrip())
    if end <= start:
        return start, start
    return len(text) - len(text[start:].lstrip()), end


def response_name(agent: str) -> str:
    """Placeholder name of an agent's answers."""
    return f"agent:{agent}:response"


def shared_name(message: ChatMessage, agent: str, tool_names: Mapping[str, str] | None = None) -> str:
    """The placeholder name of a message's content.

    Args:
        message: a message that is not a system message.
        agent: whose prompt it stands in; unnamed assistant messages are its own.
        tool_names: tool-call id to tool name, for tool messages that do not name their tool.
    """
    if message.role == "tool" or message.tool_call_id is not None:
        tool = message.name or (tool_names or {}).get(message.tool_call_id or "") or "tool"
        return f"tool:{tool}:result"
    if message.role == "assistant":
        return response_name(message.name or agent)
    if message.name and message.name.lower() not in ("user", "human"):
        return response_name(message.name)
    return "user_question"


def tool_names(messages: Iterable[ChatMessage]) -> dict[str, str]:
    """Tool-call id to tool name, of every call in ``messages``."""
    return {
        str(call["id"]): str(call.get("function", {}).get("name", ""))
        for message in messages
        for call in message.tool_calls
        if call.get("id") is not None
    }


@dataclass(frozen=True)
class Turn:
    """What a template sees as one message: one chat message, or several that had to be merged."""

    messages: tuple[ChatMessage, ...]
    role: str
    content: str = field(init=False)
    offsets: tuple[int, ...] = field(init=False)
    """Where each message's content starts within ``content``, characters."""

    def __post_init__(self) -> None:
        content, offsets = "", []
        for message in self.messages:
            if content and message.content:
                content += SEPARATOR
            offsets.append(len(content))
            content += message.content
        object.__setattr__(self, "content", content)
        object.__setattr__(self, "offsets", tuple(offsets))

    def to_dict(self) -> dict[str, Any]:
        """The form chat templates read."""
        out = self.messages[0].to_dict(self.content)
        calls = [dict(call) for message in self.messages for call in message.tool_calls]
        return {**out, "role": self.role, **({"tool_calls": calls} if calls else {})}


def with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat dict whose tool-call arguments are objects, as templates want them; what is no JSON stays text."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function", {}))
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(json.JSONDecodeError):
                function["arguments"] = json.loads(arguments) if arguments.strip() else {}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def deep_map(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` (JSON-like) with ``change`` applied to every string in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {deep_map(key, change): deep_map(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(deep_map(inner, change) for inner in value)
    return value
