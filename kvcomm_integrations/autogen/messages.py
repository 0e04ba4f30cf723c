"""Conversions from AutoGen messages and tools to chat messages and tool definitions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from autogen_core import FunctionCall
from autogen_core.models import AssistantMessage, FunctionExecutionResultMessage, LLMMessage, SystemMessage, UserMessage
from autogen_core.tools import BaseTool, Tool, ToolSchema

from kvcomm_integrations.chat.recursive_schema import recursive_schema
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.prompts.chat_message import ChatMessage

ToolChoice = Tool | Literal["auto", "required", "none"]
SplitThought = Callable[[Sequence[FunctionCall], str], tuple[str, str]]
"""From the calls of an earlier answer and its thought to its reasoning and its text."""

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def to_chat_messages(
    messages: Sequence[LLMMessage], name_prefixes: bool, split_thought: SplitThought
) -> list[ChatMessage]:
    """AutoGen messages as chat messages; one tool message per function result.

    Args:
        messages: What an agent sends.
        name_prefixes: Put ``<source> said:`` before what users and other agents have said.
        split_thought: Takes the thought of an answer with calls apart.

    Raises:
        ConfigurationError: an image, or something that is no AutoGen message.
    """
    converted: list[ChatMessage] = []
    for message in messages:
        if isinstance(message, SystemMessage):
            converted.append(ChatMessage(role="system", content=message.content))
        elif isinstance(message, UserMessage):
            text = _user_text(message)
            content = f"{message.source} said:\n{text}" if name_prefixes else text
            converted.append(ChatMessage(role="user", content=content, name=message.source or None))
        elif isinstance(message, AssistantMessage):
            converted.append(_assistant(message, split_thought))
        elif isinstance(message, FunctionExecutionResultMessage):
            converted += [
                ChatMessage(role="tool", content=result.content, name=result.name or None, tool_call_id=result.call_id)
                for result in message.content
            ]
        else:
            raise ConfigurationError(
                f"a {type(message).__name__} cannot be sent to the model; use system, user, assistant or function "
                "execution result messages"
            )
    return converted


def _user_text(message: UserMessage) -> str:
    """Text parts are joined as AutoGen joins them when it drops images."""
    if isinstance(message.content, str):
        return message.content
    if any(not isinstance(part, str) for part in message.content):
        raise ConfigurationError(
            f"the message from {message.source!r} holds an image, but the model does not support vision; "
            "send text only, or use autogen_agentchat.utils.remove_images"
        )
    return "\n".join(str(part) for part in message.content)


def _assistant(message: AssistantMessage, split_thought: SplitThought) -> ChatMessage:
    name = message.source or None
    if isinstance(message.content, str):
        return ChatMessage(role="assistant", content=message.content, name=name, reasoning=message.thought or None)
    reasoning, text = split_thought(message.content, message.thought or "")
    calls = tuple(
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.content
    )
    return ChatMessage(role="assistant", content=text, name=name, tool_calls=calls, reasoning=reasoning or None)


def merge_system_messages(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """All system messages joined into the first, for a model that reads only one."""
    system = [message for message in messages if message.role == "system"]
    if len(system) < 2:
        return list(messages)
    merged = replace(system[0], content="\n".join(message.content for message in system).rstrip())
    kept = [message for message in messages if message.role != "system" or message is system[0]]
    return [merged if message is system[0] else message for message in kept]


def to_openai_tools(tools: Sequence[Tool | ToolSchema]) -> list[dict[str, Any]]:
    """Tool definitions in OpenAI form.

    Raises:
        ConfigurationError: a tool without a valid name.
    """
    return [_to_openai_tool(_schema_of(tool) if isinstance(tool, Tool) else tool) for tool in tools]


def _schema_of(tool: Tool) -> ToolSchema:
    """A tool's schema. If arguments contain themselves AutoGen makes an endless object: they keep their ``$defs``."""
    schema = tool.schema
    full = recursive_schema(tool.args_type().model_json_schema()) if isinstance(tool, BaseTool) else None
    if full is None:
        return schema
    kept = {key: full[key] for key in ("properties", "required", "$defs") if key in full}
    return cast(ToolSchema, {**schema, "parameters": {**schema.get("parameters", {}), **kept}})


def _to_openai_tool(schema: ToolSchema) -> dict[str, Any]:
    name = str(schema.get("name", ""))
    if not _TOOL_NAME.fullmatch(name):
        raise ConfigurationError(
            f"tool name {name!r} is not valid; use 1 to 64 letters, digits, underscores and hyphens"
        )
    function = {
        "name": name,
        "description": schema.get("description", ""),
        "parameters": dict(schema.get("parameters", {"type": "object", "properties": {}})),
        **({"strict": True} if schema.get("strict") else {}),
    }
    return {"type": "function", "function": function}


def to_tool_choice(choice: ToolChoice, tools: Sequence[dict[str, Any]]) -> str | dict[str, Any]:
    """``tool_choice`` in OpenAI form.

    Raises:
        ConfigurationError: a choice that is none, or a tool that is not among ``tools``.
    """
    if isinstance(choice, str) and choice in ("auto", "required", "none"):
        return choice
    if not isinstance(choice, Tool):
        raise ConfigurationError(
            f"tool_choice={choice!r} is not understood; use a Tool object, 'auto', 'required' or 'none'"
        )
    name = choice.schema["name"]
    if not tools:
        raise ConfigurationError(f"tool_choice is the tool {name!r}, but no tools are provided")
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise ConfigurationError(
            f"tool_choice is the tool {name!r}, which is not in the provided tools: {', '.join(names)}"
        )
    return {"type": "function", "function": {"name": name}}
