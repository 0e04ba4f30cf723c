"""Which tool format a model needs: told by marks in its chat template, or named by the user."""

from __future__ import annotations

from functools import lru_cache

from kvcomm_integrations.chat.hermes import HermesFormat
from kvcomm_integrations.chat.tool_format import ToolFormat
from kvcomm_integrations.chat.vllm_format import VllmFormat
from kvcomm_integrations.errors import UnsupportedModelError
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer

_MARKS: tuple[tuple[tuple[str, ...], str, str | None], ...] = (
    (("<arg_key>", "<arg_value>"), "glm45", "glm45"),
    (("<function=", "<parameter=", "<think>"), "qwen3_coder", "qwen3"),
    (("<function=", "<parameter="), "qwen3_coder", None),
    (("<minimax:tool_call>",), "minimax_m2", "minimax_m2"),
    (("<|tool_calls_section_begin|>",), "kimi_k2", None),
    (("<seed:tool_call>",), "seed_oss", "seed_oss"),
    (("<｜tool▁calls▁begin｜>", "```json", "<think>"), "deepseek_v3", "deepseek_r1"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3", None),
    (("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"), "deepseek_v31", None),
    (("[TOOL_CALLS]",), "mistral", None),
    (("<|python_tag|>",), "llama3_json", None),
    (("functools[",), "phi4_mini_json", None),
    (("<|tool_call|>", "<|start_of_role|>"), "granite", None),
    (("<|action_start|>",), "internlm", None),
)
"""Marks that must all stand in a chat template, and vLLM's parsers for that family; first match counts."""


def tool_format_for(tokenizer: ChatTokenizer) -> ToolFormat:
    """The tool format for a model: Hermes unless its chat template speaks another family's language.

    Raises:
        UnsupportedModelError: the family's answers cannot be read.
    """
    return tool_format_of_template(str(tokenizer.hf.chat_template), tokenizer.source)


def tool_format_of_template(template: str, source: str) -> ToolFormat:
    """As ``tool_format_for``, from the chat template's text and the model's name."""
    if "<|channel|>" in template and "<|message|>" in template:
        raise UnsupportedModelError(
            f"{source!r} speaks the Harmony format, whose channels are not read yet; use another model family"
        )
    for marks, tool_parser, reasoning_parser in _MARKS:
        if all(mark in template for mark in marks):
            return named_tool_format(tool_parser, reasoning_parser)
    return HermesFormat()


@lru_cache(maxsize=32)
def named_tool_format(tool_parser: str | None, reasoning_parser: str | None) -> ToolFormat:
    """A format read by vLLM's parsers of these names: those of ``--tool-call-parser`` and ``--reasoning-parser``."""
    return VllmFormat(tool_parser, reasoning_parser)
