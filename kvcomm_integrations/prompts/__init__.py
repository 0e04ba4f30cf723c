"""Messages to segmented prompts: shared contents, matching, template rendering, tokens.

Importing it is cheap: ``transformers`` is imported when a tokenizer is loaded.
"""

from kvcomm_integrations.ids import content_id
from kvcomm_integrations.prompts.builder import BuiltPrompt, PromptBuilder
from kvcomm_integrations.prompts.chat_message import ChatMessage, response_name
from kvcomm_integrations.prompts.content import Content, Origin
from kvcomm_integrations.prompts.content_registry import ContentRegistry
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
