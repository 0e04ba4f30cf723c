"""The interface between the chat runtime and one model family's way of writing tool calls and reasoning.

Knows tool definitions in OpenAI form and answer chunks; no engine, no framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcomm_integrations.chat.chunks import AnswerChunk
from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.prompts.chat_message import ChatMessage
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer

AUTO, NONE, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True)
class ToolUse:
    """Which tools a request may call, and whether it must."""

    tools: tuple[dict[str, Any], ...] = ()
    """Definitions in OpenAI form: ``{"type": "function", "function": {"name": ..., "parameters": ...}}``."""
    required: bool = False
    """The answer has to be at least one call of one of ``callable_tools``."""
    named: str | None = None
    """The one tool that must be called."""
    parallel: bool = True
    """More than one call in one answer is allowed."""
    strict: bool = False
    """Arguments must follow the schema even where calling is optional."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tools, in order."""
        return tuple(tool["function"]["name"] for tool in self.tools)

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools an answer may call."""
        if self.named is None:
            return self.tools
        return tuple(tool for tool in self.tools if tool["function"]["name"] == self.named)

    def check_output(self, constraint: dict[str, Any] | None) -> None:
        """Raises ``ConfigurationError`` if the answer must be a call and must follow ``constraint`` as well."""
        if self.required and constraint is not None:
            raise ConfigurationError(
                "a forced tool call and a structured output cannot be combined; use tool_choice='auto' or drop one"
            )


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | bool | Mapping[str, Any] | None = None,
    *,
    parallel: bool = True,
    strict: bool | None = None,
) -> ToolUse:
    """Bring tools and every form of ``tool_choice`` into one shape.

    Args:
        tools: Definitions in OpenAI form.
        tool_choice: ``None``/``"auto"``, ``"none"``/``False``, ``"required"``/``"any"``/``True``, a tool's name, or
            ``{"type": "function", "function": {"name": ...}}``.
        parallel: Allow more than one call in one answer.
        strict: Force arguments to follow their schema; ``None`` reads each function's own ``strict``.

    Raises:
        ConfigurationError: a tool without a name, or a choice that names no given tool.
    """
    checked = tuple(_checked_tool(tool) for tool in tools or ())
    if strict is None:
        strict = any(bool(tool["function"].get("strict")) for tool in checked)
    if isinstance(tool_choice, Mapping):
        name = tool_choice.get("function", {}).get("name") or tool_choice.get("name")
        if not isinstance(name, str):
            raise ConfigurationError(
                f"tool_choice {dict(tool_choice)!r} names no function; use "
                '{"type": "function", "function": {"name": "<tool>"}}'
            )
        tool_choice = name
    if tool_choice in (None, AUTO):
        return ToolUse(checked, parallel=parallel, strict=strict)
    if tool_choice is False or tool_choice == NONE:
        return ToolUse()
    names = ToolUse(checked).names
    if tool_choice is True or (tool_choice in (REQUIRED, "any") and tool_choice not in names):
        if not checked:
            raise ConfigurationError(f"tool_choice={tool_choice!r} needs at least one tool; none was given")
        return ToolUse(checked, required=True, parallel=parallel, strict=True)
    if tool_choice not in names:
        raise ConfigurationError(f"tool_choice names {tool_choice!r}, but the tools are {', '.join(names) or 'none'}")
    return ToolUse(checked, required=True, named=str(tool_choice), parallel=parallel, strict=True)


def _checked_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not function.get("name"):
        raise ConfigurationError(
            f"tool {dict(tool)!r} is not in OpenAI form; use "
            '{"type": "function", "function": {"name": ..., "parameters": ...}}'
        )
    return {**tool, "type": "function", "function": dict(function)}


class AnswerParser(ABC):
    """Splits one growing answer into chunks. One instance per answer."""

    @abstractmethod
    def feed(self, text: str, token_ids: Sequence[int] = (), *, last: bool = False) -> list[AnswerChunk]:
        """The chunks that are certain once this text has come.

        Args:
            text: What was generated since the last call; may be empty.
            token_ids: The ids it came from.
            last: Nothing will follow; whatever is held back comes out now.
        """

    def closed(self, index: int) -> bool | None:
        """Whether the model itself has written a call to its end. To be asked after the last ``feed``.

        Args:
            index: Of the call, as in its chunks.

        Returns:
            ``True`` if the text shows its end, ``False`` if the text shows that the end is missing, and ``None`` if
            that cannot be told. A call of an answer that the limit has cut off is run only if this is ``True``.
        """
        return None


class ToolFormat(ABC):
    """How one model family is told of tools and how it calls them. Stateless; shared by all requests."""

    @property
    def calls_beside_answer(self) -> bool:
        """One request may have tools and a structured output: the model then gives either. Where this is not so, such
        a request is refused, since the output's constraint would forbid every call."""
        return False

    @abstractmethod
    def encode(
        self, tokenizer: ChatTokenizer, messages: Sequence[ChatMessage], use: ToolUse
    ) -> tuple[list[ChatMessage], list[dict[str, Any]] | None]:
        """The messages and tools to hand to the chat template.

        A template that cannot show tools or earlier calls may get them as text inside the messages.
        """

    @abstractmethod
    def adjust(
        self, tokenizer: ChatTokenizer, use: ToolUse, sampling: SamplingOptions, prompt: SegmentedPrompt
    ) -> SamplingOptions:
        """Sampling that enforces ``use``; with a structured output and optional tools, either may come.

        Args:
            tokenizer: The model's.
            use: The tools of the request.
            sampling: As the caller asked for it.
            prompt: The rendered prompt; it may have opened a thinking block, which is not constrained.

        Raises:
            ConfigurationError: the two cannot be combined.
        """

    @abstractmethod
    def parser(
        self, tokenizer: ChatTokenizer, use: ToolUse, prompt: SegmentedPrompt, *, constrained: bool
    ) -> AnswerParser:
        """A parser for one answer.

        Args:
            tokenizer: The model's.
            use: The tools of the request.
            prompt: The rendered prompt; it may have opened a thinking block.
            constrained: The caller asked for a structured output, so a thinking block need not be closed.
        """
