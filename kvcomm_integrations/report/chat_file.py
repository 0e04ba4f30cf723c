"""Reads a prompt, or a finished run's report, from a JSON file, as ``kvcomm explain`` takes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.prompts.chat_message import ChatMessage
from kvcomm_integrations.wire import RequestReport, first_problem

_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "developer": "system", "function": "tool"}


class _Message(BaseModel):
    """One message of a file, in OpenAI's form or as LangChain dumps it."""

    model_config = ConfigDict(extra="ignore")

    role: str
    content: str = ""
    name: str | None = None
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _either_form(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("data"), dict):
            value = {"type": value.get("type"), **value["data"]}
        role = value.get("role", value.get("type"))
        return {**{k: v for k, v in value.items() if v is not None}, "role": _ROLES.get(str(role), role)}

    @field_validator("role")
    @classmethod
    def _known_role(cls, role: str) -> str:
        if role not in ("system", "user", "assistant", "tool"):
            raise ValueError(f"{role!r} is unknown; use system, user, assistant or tool")
        return role

    @field_validator("content", mode="before")
    @classmethod
    def _text_of_blocks(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return "".join(part if isinstance(part, str) else _block_text(part) for part in content)

    @field_validator("tool_calls")
    @classmethod
    def _openai_calls(cls, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [_openai_call(call) for call in calls]

    def to_chat_message(self) -> ChatMessage:
        """The form prompts are built from."""
        return ChatMessage(self.role, self.content, self.name, tuple(self.tool_calls), self.tool_call_id)


def _block_text(block: Any) -> str:
    if not isinstance(block, dict):
        raise ValueError(f"content block {block!r} is neither text nor an object")
    return str(block.get("text") or "")


def _openai_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"tool call {call!r} has no name")
    if "function" in call:
        return call
    function = {"name": call["name"], "arguments": call.get("args", {})}
    return {"id": call.get("id") or "", "type": "function", "function": function}


class _File(BaseModel):
    """A prompt as a file says it: ``{"messages": [...]}``, or the bare list."""

    messages: list[_Message] = Field(min_length=1)
    agent: str | None = None
    tools: list[dict[str, Any]] | None = None
    answer: str | None = None


@dataclass(frozen=True)
class Chat:
    """One prompt of one agent."""

    agent: str
    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    answer: str | None = None
    """What the agent answered, if that is known."""


def read_chat(path: Path, agent: str | None = None) -> Chat:
    """Read a prompt from JSON: a list of messages, or an object with ``messages`` and maybe ``agent, tools, answer``.

    Args:
        path: the file.
        agent: whose prompt it is; ``None``: the file's ``agent``, else the file's name without suffix.

    Raises:
        ConfigurationError: the file cannot be read or holds something else.
    """
    data = _read_json(path)
    try:
        file = _File.model_validate({"messages": data} if isinstance(data, list) else data)
    except ValidationError as err:
        raise ConfigurationError(f"{path} holds no messages: {first_problem(err, 'file')}") from err
    messages = tuple(message.to_chat_message() for message in file.messages)
    return Chat(agent or file.agent or path.stem, messages, tuple(file.tools or ()), file.answer)


def read_report(path: Path) -> RequestReport:
    """Read a finished run's report from JSON, by itself or inside a message's ``response_metadata``.

    Raises:
        ConfigurationError: the file cannot be read or holds no report.
    """
    data = _read_json(path)
    for key in ("response_metadata", "kvcomm", "report"):
        if isinstance(data, dict) and isinstance(data.get(key), dict):
            data = data[key]
    if not isinstance(data, dict) or "segments" not in data:
        raise ConfigurationError(
            f"{path} holds no report: an object with 'segments' is needed, as in model.last_report"
        )
    try:
        return RequestReport.model_validate(data)
    except ValidationError as err:
        raise ConfigurationError(f"{path} holds no report: {first_problem(err, 'file')}") from err


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as err:
        raise ConfigurationError(
            f"{path} is not valid JSON at line {err.lineno}, column {err.colno}: {err.msg}"
        ) from err
    except (OSError, UnicodeDecodeError, RecursionError) as err:
        raise ConfigurationError(f"{path} cannot be read: {err}") from err
