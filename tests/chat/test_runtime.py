"""The chat runtime on the fake engine: what is registered, under which ids, and who may see it."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from kvcomm_integrations.chat.chunks import CallChunk, FinalChunk, ReasoningChunk, TextChunk
from kvcomm_integrations.chat.runtime import ChatRuntime, runtime_for, tenant_salt
from kvcomm_integrations.chat.tool_format import tool_use
from kvcomm_integrations.config import EngineConfig, Isolation, ReuseConfig
from kvcomm_integrations.engines.fake import FakeEngine
from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.errors import ConfigurationError, EngineError
from kvcomm_integrations.planning.content_keys import names_session
from kvcomm_integrations.prompts.chat_message import ChatMessage
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
ANSWER = "The Seine reaches the sea at Le Havre."
USER = [ChatMessage("user", "Where does the Seine reach the sea?")]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def byte_tokenizer() -> ChatTokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE)
    return ChatTokenizer(hf, source="bytes")


@pytest.fixture(scope="module")
def tokenizer():
    folder = os.environ.get("KVCOMM_TEST_MODEL")
    return ChatTokenizer.from_pretrained(folder) if folder else byte_tokenizer()


def runtime(tokenizer, script=ANSWER, **engine) -> ChatRuntime:
    return ChatRuntime(FakeEngine(tokenizer, script, **engine))


def answer(chat: ChatRuntime, **kwargs):
    pieces = list(chat.stream_sync(chat.prepare(USER, **kwargs)))
    assert isinstance(pieces[-1], FinalChunk)
    assert not any(isinstance(piece, FinalChunk) for piece in pieces[:-1])
    return pieces


def registered(chat: ChatRuntime, session="default"):
    return [c for c in chat.registry.contents(session) if c.name.startswith("agent:")]


def test_the_response_is_registered_with_the_ids_it_was_generated_as(tokenizer):
    ids = tuple(t for char in ANSWER for t in tokenizer.encode(char, allow_special=False))  # not how it re-tokenises
    chat = runtime(tokenizer, ids)
    last = answer(chat, agent="geo")[-1]
    (content,) = registered(chat)
    assert (content.name, content.text, content.token_ids) == ("agent:geo:response", ANSWER, ids)
    assert last.segment_id == content.id
    assert last.finish_reason == "stop" and last.usage.completion_tokens == len(ids) + 1


def test_thinking_is_not_part_of_the_registered_response(tokenizer):
    chat = runtime(tokenizer, f"<think>\nIs it Rouen? {ANSWER}\n</think>\n\n{ANSWER}")
    pieces = answer(chat)
    assert "".join(p.text for p in pieces if isinstance(p, TextChunk)) == ANSWER
    assert "Rouen" in "".join(p.text for p in pieces if isinstance(p, ReasoningChunk))
    assert pieces[-1].usage.reasoning_tokens > 0
    (content,) = registered(chat)
    assert content.text == ANSWER
    assert not content.token_ids or tokenizer.spells(content.token_ids, ANSWER)


def test_a_stop_string_is_not_part_of_the_registered_response(tokenizer):
    chat = runtime(tokenizer, ANSWER + "STOP and more")
    last = answer(chat, sampling=SamplingOptions(stop=("STOP",)))[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", "STOP")
    (content,) = registered(chat)
    assert content.text == ANSWER
    assert not content.token_ids or tokenizer.spells(content.token_ids, ANSWER)


def test_an_answer_cut_off_by_the_limit_is_registered_whole(tokenizer):
    chat = runtime(tokenizer)
    last = answer(chat, sampling=SamplingOptions(max_tokens=6))[-1]
    (content,) = registered(chat)
    assert last.finish_reason == "length" and len(content.token_ids) == 6 and ANSWER.startswith(content.text)


@pytest.mark.parametrize("script", ["", "   ", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'])
def test_an_answer_without_text_registers_nothing(tokenizer, script):
    chat = runtime(tokenizer, script)
    assert answer(chat, tools=[TOOL])[-1].segment_id is None
    assert registered(chat) == []


def test_an_engine_error_in_the_middle_registers_nothing_and_is_not_retried(tokenizer):
    class Breaking(FakeEngine):
        async def generate(self, request):
            yield await anext(super().generate(request))
            raise EngineError("died")

    chat = ChatRuntime(Breaking(tokenizer, ANSWER))
    with pytest.raises(EngineError, match="died"):
        list(chat.stream_sync(chat.prepare(USER), retries=3))
    assert len(chat.engine.requests) == 1 and registered(chat) == []


def test_a_stream_without_an_end_is_an_error(tokenizer):
    class Silent(FakeEngine):
        async def generate(self, request):
            yield await anext(super().generate(request))

    chat = ChatRuntime(Silent(tokenizer, ANSWER))
    with pytest.raises(EngineError, match="without a finish reason"):
        list(chat.stream_sync(chat.prepare(USER)))


async def test_one_runtime_serves_loops_and_threads_at_once(tokenizer):
    chat = runtime(tokenizer, token_latency=0.001)

    async def one(i):
        prepared = await chat.aprepare(USER, session=f"s{i}")
        return [piece async for piece in chat.stream(prepared, timeout=30)]

    results: list[list[object]] = []
    threads = [threading.Thread(target=lambda: results.append(answer(chat))) for _ in range(4)]
    for thread in threads:
        thread.start()
    many = await asyncio.gather(*(one(i) for i in range(8)))
    for thread in threads:
        await asyncio.to_thread(thread.join)
    for pieces in [*many, *results]:
        assert "".join(p.text for p in pieces if isinstance(p, TextChunk)) == ANSWER
    assert all(len(registered(chat, f"s{i}")) == 1 for i in range(8))


def test_tenants_with_equal_session_names_do_not_meet(tokenizer):
    chat = runtime(tokenizer)
    answer(chat, tenant="a", session="s")
    prepared = chat.prepare([*USER, ChatMessage("assistant", ANSWER, name="x")], tenant="b", session="s", agent="y")
    assert registered(chat, "s") == []
    assert all(segment.name != "agent:default:response" for segment in prepared.request.prompt.segments)


async def test_a_released_session_is_forgotten_here_and_in_the_engine(tokenizer):
    chat = runtime(tokenizer)
    chat.release_session("never seen")
    for tenant in ("default", "t"):
        answer(chat, tenant=tenant, session="s", agent="x")
    history = [*USER, ChatMessage("assistant", ANSWER, name="x"), ChatMessage("user", "Is that so?")]
    for tenant in ("default", "t"):
        list(chat.stream_sync(chat.prepare(history, agent="y", tenant=tenant, session="s")))
    chat.release_session("s", tenant="other")
    assert registered(chat, "s")
    await chat.arelease_session("s")
    assert registered(chat, "s") == []
    held = {entry.key.scope for entry in chat.engine._forecast.index.entries()}
    assert not any(names_session(scope, "default", "s") for scope in held)
    assert any(names_session(scope, "t", "s") for scope in held)


def test_salts(tokenizer):
    assert tenant_salt("default") is None
    assert tenant_salt("a") == tenant_salt("a") != tenant_salt("b")
    config = EngineConfig(model="x", reuse=ReuseConfig(isolation=Isolation.GLOBAL))
    assert ChatRuntime(FakeEngine(tokenizer, config=config)).prepare(USER, tenant="a").request.cache_salt is None


def test_one_runtime_per_engine(tokenizer):
    one, other = FakeEngine(tokenizer), FakeEngine(tokenizer)
    assert runtime_for(one) is runtime_for(one) is not runtime_for(other)


def test_counting_equals_what_is_sent(tokenizer):
    chat = runtime(tokenizer)
    assert chat.count_tokens(USER) == chat.prepare(USER).prompt_tokens
    assert chat.count_tokens(USER, tools=[TOOL]) == chat.prepare(USER, tools=[TOOL]).prompt_tokens
    assert chat.count_tokens([]) == 0


@pytest.mark.parametrize(
    ("choice", "required", "named"),
    [(None, False, None), ("auto", False, None), ("any", True, None), (True, True, None), ("f", True, "f")],
)
def test_tool_choices(choice, required, named):
    use = tool_use([TOOL], choice)
    assert (use.required, use.named, use.names) == (required, named, ("f",))


@pytest.mark.parametrize("tool", [{}, {"type": "function"}, {"function": {}}, {"name": "f"}])
def test_tools_in_another_form_are_refused(tool):
    with pytest.raises(ConfigurationError, match="OpenAI form"):
        tool_use([tool])


def test_calls_keep_their_ids_apart(tokenizer):
    block = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    chat = runtime(tokenizer, block * 2)
    ids = [p.id for p in answer(chat, tools=[TOOL]) if isinstance(p, CallChunk) and p.id]
    assert len(set(ids)) == 2
