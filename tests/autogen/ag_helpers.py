"""A tokenizer without a model, and short ways to look at what the fake engine received."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvcomm_integrations.autogen import KVCommChatCompletionClient
from kvcomm_integrations.engines.fake import FakeEngine
from kvcomm_integrations.engines.interface import GenerationRequest
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import RequestReport, SegmentKind

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Knows neither tools nor earlier calls, like the templates of many small models."""

THINKING = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""Shows tools, calls and earlier thinking, and opens a thinking block."""

STRICT = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "<|im_start|>{% if loop.first and rest is not sameas messages and messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
)
"""Takes one system message, then user and assistant in turn, like Mistral's."""

LAST_SYSTEM_ONLY = (
    "{% set ns = namespace(system='') %}{% for message in messages %}{% if message.role == 'system' %}"
    "{% set ns.system = message.content %}{% endif %}{% endfor %}{{ ns.system }}\n"
    "{% for message in messages %}{% if message.role != 'system' %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n"
)
"""Keeps the last system message and drops the others without a word."""


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


def fake(client: KVCommChatCompletionClient) -> FakeEngine:
    """The fake engine behind a client."""
    engine = client.runtime.engine
    assert isinstance(engine, FakeEngine)
    return engine


def who(client: KVCommChatCompletionClient) -> list[tuple[str, str]]:
    """Agent and session of every request, in order."""
    return [(request.params.agent, request.params.session) for request in fake(client).requests]


def agents(client: KVCommChatCompletionClient) -> list[str]:
    """Agent of every request, in order."""
    return [agent for agent, _ in who(client)]


def sessions(client: KVCommChatCompletionClient) -> set[str]:
    """Sessions of all requests."""
    return {session for _, session in who(client)}


def requests_of(client: KVCommChatCompletionClient, agent: str) -> list[GenerationRequest]:
    """What one agent sent, in order."""
    return [request for request in fake(client).requests if request.params.agent == agent]


def placeholders(client: KVCommChatCompletionClient, request: GenerationRequest) -> dict[str, str]:
    """Name to text of the shared contents that were found in a request's prompt."""
    tokenizer = fake(client).tokenizer
    return {
        segment.name: tokenizer.decode(request.prompt.token_ids[segment.start : segment.end])
        for segment in request.prompt.segments
        if segment.kind is SegmentKind.PLACEHOLDER
    }


async def until_asked(client: KVCommChatCompletionClient, timeout: float = 10) -> None:
    """Wait until the engine has received a request."""
    async with asyncio.timeout(timeout):
        while not fake(client).requests:  # noqa: ASYNC110 - the fake engine announces nothing
            await asyncio.sleep(0.01)


def loaded_from(report: RequestReport) -> dict[str, str]:
    """Name of each loaded segment to the agent whose cache it came from."""
    return {segment.name: segment.source for segment in report.segments if segment.loaded}
