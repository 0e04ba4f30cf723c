"""The demo model's tokenizer, and copies of it with other templates."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from kvcomm_integrations.prompts import ChatTokenizer, ContentRegistry, PromptBuilder

from .templates import TEMPLATES


@pytest.fixture(scope="session")
def tokenizer(demo_model: Path) -> ChatTokenizer:
    return ChatTokenizer.from_pretrained(demo_model)


@pytest.fixture
def registry() -> ContentRegistry:
    return ContentRegistry()


@pytest.fixture
def builder(tokenizer: ChatTokenizer, registry: ContentRegistry) -> PromptBuilder:
    return PromptBuilder(tokenizer, registry)


def reading(tokenizer: ChatTokenizer, template_text: str) -> ChatTokenizer:
    """The same tokenizer with another chat template."""
    other = copy.copy(tokenizer)
    other.hf = copy.copy(tokenizer.hf)
    other.hf.chat_template = template_text
    return other


@pytest.fixture(scope="session")
def template_tokenizers(tokenizer: ChatTokenizer) -> dict[str, ChatTokenizer]:
    """By template name: the demo tokenizer, to which the control tokens of all the templates were added."""
    hf = copy.deepcopy(tokenizer.hf)
    hf.add_tokens(sorted({word for template in TEMPLATES for word in template.control}), special_tokens=True)
    steered = ChatTokenizer(hf)
    return {template.name: reading(steered, template.with_ends()) for template in TEMPLATES}
