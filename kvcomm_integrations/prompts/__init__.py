"""Messages to segmented prompts: shared contents, matching, template rendering, tokens.

Imports neither torch, vLLM, transformers nor an agent framework; names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcomm_integrations.prompts.builder import BuiltPrompt, PromptBuilder
    from kvcomm_integrations.prompts.chat_message import ChatMessage
    from kvcomm_integrations.prompts.content_registry import Content, ContentRegistry, Origin, content_id, response_name
    from kvcomm_integrations.prompts.segments import SegmentedPrompt
    from kvcomm_integrations.prompts.tokenizer import ChatTokenizer

__all__ = [
    "BuiltPrompt",
    "ChatMessage",
    "ChatTokenizer",
    "Content",
    "ContentRegistry",
    "Origin",
    "PromptBuilder",
    "SegmentedPrompt",
    "content_id",
    "response_name",
]

_HOME = {
    "BuiltPrompt": "builder",
    "ChatMessage": "chat_message",
    "ChatTokenizer": "tokenizer",
    "Content": "content_registry",
    "ContentRegistry": "content_registry",
    "Origin": "content_registry",
    "PromptBuilder": "builder",
    "SegmentedPrompt": "segments",
    "content_id": "content_registry",
    "response_name": "content_registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
