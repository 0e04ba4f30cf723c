"""Finds out what a chat template can show, by rendering tiny conversations with and without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.prompts.chat_message import ChatMessage
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer

_MARK = "probe_tool_zq"
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": _MARK, "description": "probe", "parameters": {"type": "object", "properties": {}}},
}
_CALL: dict[str, Any] = {"id": "callprobe", "type": "function", "function": {"name": _MARK, "arguments": {}}}


@dataclass(frozen=True)
class TemplateAbilities:
    """What a chat template renders by itself."""

    tools: bool
    """Tool definitions given as ``tools=``."""
    tool_calls: bool
    """Earlier calls of an assistant message."""
    system_messages: bool
    """A second and a later system message, or it refuses them openly. Some keep only one of them and say nothing."""


_known: WeakKeyDictionary[ChatTokenizer, TemplateAbilities] = WeakKeyDictionary()


def template_abilities(tokenizer: ChatTokenizer) -> TemplateAbilities:
    """The abilities of a tokenizer's chat template; probed once per tokenizer."""
    if tokenizer not in _known:
        user = ChatMessage(role="user", content="x")
        call = ChatMessage(role="assistant", content="", tool_calls=(_CALL,))
        answer = ChatMessage(role="tool", content="y", tool_call_id="callprobe", name=_MARK)
        _known[tokenizer] = TemplateAbilities(
            tools=_shows(tokenizer, [user], [_TOOL]),
            tool_calls=_shows(tokenizer, [user, call, answer], None),
            system_messages=_shows_system_messages(tokenizer),
        )
    return _known[tokenizer]


def _shows(tokenizer: ChatTokenizer, messages: list[ChatMessage], tools: list[dict[str, Any]] | None) -> bool:
    """A template that refuses the probe is taken as unable: its messages are then plain text."""
    try:
        text = tokenizer.render([message.to_dict() for message in messages], tools=tools)
    except ConfigurationError:
        return False
    return text.count(_MARK) > sum(message.name == _MARK for message in messages)


def _shows_system_messages(tokenizer: ChatTokenizer) -> bool:
    """A refusal is no harm: the messages are then rearranged."""
    texts = {f"probe {number} zq": role for number, role in enumerate(("system", "system", "user", "system"))}
    try:
        text = tokenizer.render([{"role": role, "content": content} for content, role in texts.items()])
    except ConfigurationError:
        return True
    return all(content in text for content in texts)
