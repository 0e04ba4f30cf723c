"""A tokenizer without a model, and short ways to look at what the fake engine received."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.messages import AIMessage

from kvcomm_integrations.engines.fake import FakeEngine
from kvcomm_integrations.langchain import ChatKVComm
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import TREATMENTS

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Knows neither tools nor earlier calls, like the templates of many small models."""

TOOL_CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
"""Shows tools and calls, and opens a thinking block on request."""


def byte_tokenizer(template: str, marks: Sequence[str] = ()) -> ChatTokenizer:
    """One token per byte, and one per mark: no files, no downloads, and no character is ever unknown."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)
    return ChatTokenizer(hf, source="bytes")


def fake(model: ChatKVComm) -> FakeEngine:
    """The fake engine behind a model."""
    assert isinstance(model.engine, FakeEngine)
    return model.engine


def who(model: ChatKVComm) -> list[tuple[str, str]]:
    """Agent and session of every request, in order."""
    return [(request.params.agent, request.params.session) for request in fake(model).requests]


def details(message: AIMessage) -> dict[str, int]:
    """What became of the prompt's tokens, and ``cache_read``."""
    assert message.usage_metadata is not None
    counts = {name: message.response_metadata["kvcomm"][name] for name in TREATMENTS}
    return {**counts, **message.usage_metadata["input_token_details"]}
