"""A codec over vLLM's own tool and reasoning parsers, for families that do not write like Hermes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcomm_integrations.engines.base import SamplingOptions
from kvcomm_integrations.engines.hermes import HermesCodec, after_thinking
from kvcomm_integrations.engines.tool_codec import AnswerParser, ToolCodec, ToolUse
from kvcomm_integrations.prompts.messages import ChatMessage
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class VllmCodec(ToolCodec):
    """Reads answers with vLLM's parsers and constrains them as vLLM's server would.

    Args:
        tool_parser: A name that ``--tool-call-parser`` takes; ``None``: no calls are read.
        reasoning_parser: A name that ``--reasoning-parser`` takes; ``None``: thinking stays in the text.
    """

    tool_parser: str | None
    reasoning_parser: str | None

    def encode(
        self, tokenizer: ChatTokenizer, messages: Sequence[ChatMessage], use: ToolUse
    ) -> tuple[list[ChatMessage], list[dict[str, Any]] | None]:
        """Everything goes to the template: a family with a parser of its own has a template that shows tools."""
        return list(messages), list(use.tools) or None

    def adjust(
        self, tokenizer: ChatTokenizer, use: ToolUse, sampling: SamplingOptions, prompt: SegmentedPrompt
    ) -> SamplingOptions:
        """See ``ToolCodec.adjust``."""
        if not use.tools or self.tool_parser is None:
            if self.reasoning_parser is None:
                return sampling
            return replace(
                sampling, structured_output=after_thinking(sampling.structured_output, tokenizer, prompt.text)
            )
        from kvcomm_integrations.engines.vllm_parsers import adjusted

        return adjusted(self.tool_parser, self.reasoning_parser, tokenizer, use, sampling)

    def parser(
        self, tokenizer: ChatTokenizer, use: ToolUse, prompt: SegmentedPrompt, *, constrained: bool
    ) -> AnswerParser:
        """See ``ToolCodec.parser``."""
        tool_parser = self.tool_parser if use.tools else None
        if tool_parser is None and self.reasoning_parser is None:
            return HermesCodec().parser(tokenizer, ToolUse(), prompt, constrained=constrained)
        from kvcomm_integrations.engines.vllm_parsers import VllmAnswerParser

        return VllmAnswerParser(tool_parser, self.reasoning_parser, tokenizer, use, prompt)
