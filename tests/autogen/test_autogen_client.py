"""One client by itself: calls, streams, cancellation, tools, JSON, counting. What AutoGen's own clients promise."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from ag_helpers import LAST_SYSTEM_ONLY, STRICT, byte_tokenizer, fake, until_asked
from autogen_core import CancellationToken, FunctionCall, Image
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    RequestUsage,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from pydantic import BaseModel

from kvcomm_integrations.autogen import KVCommChatCompletionClient
from kvcomm_integrations.chat.model_settings import tool_format_of
from kvcomm_integrations.errors import ConfigurationError, ContextOverflowError, EngineError

ANSWER = "The Seine reaches the sea at Le Havre, after Rouen."
HELLO = [SystemMessage(content="You are brief."), UserMessage(content="Where does the Seine end?", source="user")]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rouen"}}\n</tool_call>'


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


WEATHER = FunctionTool(weather, description="The weather of a city.")
ADD = FunctionTool(add, description="The sum of two numbers.")


class Answer(BaseModel):
    """The answer."""

    value: int


async def read(stream):
    """The strings of a stream and its result."""
    items = [item async for item in stream]
    assert isinstance(items[-1], CreateResult) and all(isinstance(item, str) for item in items[:-1])
    return items[:-1], items[-1]


async def both(client, messages=HELLO, **kwargs):
    """The result of a call; the same call streamed gives an equal one."""
    result = await client.create(messages, **kwargs)
    _, streamed = await read(client.create_stream(messages, **kwargs))
    ignore = {"content": {"__all__": {"id"}}} if isinstance(result.content, list) else {}
    assert streamed.model_dump(exclude=ignore) == result.model_dump(exclude=ignore)
    return result


# ---- calls and streams ---------------------------------------------------------------------------------------------


async def test_create(make):
    client = make(ANSWER)
    result = await both(client)
    assert result.content == ANSWER
    assert (result.finish_reason, result.cached, result.thought, result.logprobs) == ("stop", False, None, None)
    assert result.usage.prompt_tokens == len(fake(client).requests[0].prompt.token_ids)
    assert result.usage.completion_tokens == 1 + len(fake(client).tokenizer.encode(ANSWER, allow_special=False))


async def test_create_stream_is_many_strings_and_one_result(make):
    strings, result = await read(make(ANSWER).create_stream(HELLO))
    assert len(strings) > 3 and "" not in strings
    assert "".join(strings) == result.content == ANSWER


async def test_length_and_empty_answers(make):
    assert (await both(make(ANSWER, max_tokens=3))).finish_reason == "length"
    empty = await both(make(""))
    assert (empty.content, empty.finish_reason) == ("", "stop")


async def test_usage_adds_up(make):
    client = make(ANSWER)
    assert client.actual_usage() == client.total_usage() == RequestUsage(0, 0)
    first = await client.create(HELLO)
    _, second = await read(client.create_stream(HELLO))
    total = RequestUsage(
        first.usage.prompt_tokens + second.usage.prompt_tokens,
        first.usage.completion_tokens + second.usage.completion_tokens,
    )
    assert client.actual_usage() == client.total_usage() == total
    assert second.usage == first.usage and second.usage.completion_tokens > 0


async def test_settings_reach_the_engine_and_a_call_overrides_them(make):
    client = make(ANSWER, temperature=0, max_tokens=50, stop="###", seed=3)
    await client.create(HELLO)
    await client.create(HELLO, extra_create_args={"temperature": 0.5, "stop": ["a", "b"], "top_k": 4})
    first, second = (request.sampling for request in fake(client).requests)
    assert (first.temperature, first.max_tokens, first.stop, first.seed) == (0, 50, ("###",), 3)
    assert (second.temperature, second.max_tokens, second.stop, second.top_k) == (0.5, 50, ("a", "b"), 4)


@pytest.mark.parametrize("extra", [{"temprature": 0.5}, {"temperature": "hot"}, {"kvcomm": {"agnet": "a"}}])
async def test_extra_create_args_are_validated(make, extra):
    client = make(ANSWER)
    with pytest.raises(ValueError, match=r"temprature is unknown|hot|agnet"):
        await client.create(HELLO, extra_create_args=extra)
    with pytest.raises(ConfigurationError, match="extra_create_args"):
        await read(client.create_stream(HELLO, extra_create_args=extra))
    assert fake(client).requests == []


async def test_openai_stream_options_do_no_harm(make):
    _, result = await read(
        make(ANSWER).create_stream(HELLO, extra_create_args={"stream_options": {"include_usage": True}})
    )
    assert result.usage.completion_tokens > 0


async def test_identity_and_reuse_of_one_call(make):
    client = make(ANSWER, tenant="acme")
    kvcomm = {"agent": "critic", "session": "s", "mode": "observe", "policy": "aligned"}
    await client.create(HELLO, extra_create_args={"kvcomm": kvcomm})
    await client.create(HELLO)
    first, second = (request.params for request in fake(client).requests)
    assert (first.agent, first.session, first.mode, first.policy) == ("critic", "s", "observe", "aligned")
    assert first.tenant == second.tenant == "acme"
    assert second.mode == "auto" and second.policy is None
    assert all(request.cache_salt for request in fake(client).requests)


async def test_logprobs(make):
    result = await both(make(ANSWER), extra_create_args={"logprobs": True, "max_tokens": 4})
    assert len(result.logprobs) == 4
    entry = result.logprobs[0]
    assert (entry.token, entry.logprob, bytes(entry.bytes).decode()) == ("The", -0.5, "The") or entry.token == "T"
    assert entry.top_logprobs[0].logprob == -0.5
    assert (await both(make(ANSWER), extra_create_args={"logprobs": True, "top_logprobs": 0})).logprobs[
        0
    ].top_logprobs == []


async def test_a_prompt_too_long_is_refused(make):
    client = make(ANSWER, engine={"max_model_len": 64})
    with pytest.raises(ContextOverflowError, match="64"):
        await client.create([UserMessage(content="many words " * 100, source="user")])
    assert client.remaining_tokens([UserMessage(content="many words " * 100, source="user")]) < 0


async def test_engine_errors_are_retried_and_then_raised(make):
    assert (await make([EngineError("lost"), ANSWER]).create(HELLO)).content == ANSWER
    with pytest.raises(EngineError, match="lost"):
        await make(EngineError("lost"), max_retries=0).create(HELLO)


async def test_timeout(make):
    client = make(ANSWER, engine={"latency": 5}, timeout=0.05)
    with pytest.raises(TimeoutError, match=r"0\.05"):
        await client.create(HELLO)
    assert len(fake(client).aborted) == 1


async def test_messages_that_cannot_be_sent(make):
    from PIL import Image as Pixels

    picture = UserMessage(content=["look", Image(Pixels.new("RGB", (2, 2)))], source="user")
    with pytest.raises(ConfigurationError, match="vision"):
        await make(ANSWER).create([picture])
    with pytest.raises(ConfigurationError, match="at least one message"):
        await make(ANSWER).create([])
    client = make(ANSWER)
    await client.create([UserMessage(content=["one", "two"], source="user")])
    assert "one\ntwo" in fake(client).requests[0].prompt.text


async def test_one_client_in_several_threads(make):
    client = make(ANSWER)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(asyncio.run(client.create(HELLO)).content)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert results == [ANSWER] * 4
    assert client.total_usage().completion_tokens % 4 == 0


async def test_close_leaves_the_engine_to_others(make):
    client = make(ANSWER)
    await client.close()
    await client.close()
    assert (await client.create(HELLO)).content == ANSWER


# ---- cancellation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["before", "latency", "tokens"])
async def test_cancellation_ends_the_call_and_the_request(make, stream, when):
    client = make(ANSWER, engine={"latency": 30 if when == "latency" else 0, "token_latency": 0.02})
    token = CancellationToken()
    if when == "before":
        token.cancel()

    async def run():
        if stream:
            return await read(client.create_stream(HELLO, cancellation_token=token))
        return await client.create(HELLO, cancellation_token=token)

    task = asyncio.create_task(run())
    if when != "before":
        await until_asked(client)
        token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert len(fake(client).aborted) == (0 if when == "before" else 1)
    assert client.total_usage() == RequestUsage(0, 0)


async def test_cancellation_while_the_consumer_is_busy(make):
    client = make(ANSWER)
    token = CancellationToken()
    stream = client.create_stream(HELLO, cancellation_token=token)
    await anext(stream)
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await anext(stream)
    assert len(fake(client).aborted) == 1


async def test_cancellation_from_another_thread(make):
    client = make(ANSWER, engine={"latency": 30})
    token = CancellationToken()
    threading.Timer(0.2, token.cancel).start()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(client.create(HELLO, cancellation_token=token), 10)


async def test_cancelling_the_task_or_leaving_the_stream_aborts(make):
    client = make(ANSWER, engine={"token_latency": 0.02})
    task = asyncio.create_task(client.create(HELLO, cancellation_token=CancellationToken()))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stream = client.create_stream(HELLO, cancellation_token=CancellationToken())
    await anext(stream)
    await stream.aclose()
    assert len(fake(client).aborted) == 2


async def test_a_token_cancelled_after_the_call_harms_nobody(make):
    client = make(ANSWER)
    token = CancellationToken()
    result = await client.create(HELLO, cancellation_token=token)
    token.cancel()
    assert result.content == ANSWER
    assert fake(client).aborted == []


# ---- tools ---------------------------------------------------------------------------------------------------------


async def test_a_tool_call(make):
    client = make(CALL)
    result = await both(client, tools=[WEATHER])
    assert result.finish_reason == "function_calls"
    assert isinstance(result.content[0], FunctionCall) and result.content[0].id
    assert result.content[0].name == "weather"
    assert json.loads(result.content[0].arguments) == {"city": "Rouen"}
    assert result.thought is None
    assert "The weather of a city." in fake(client).requests[0].prompt.text


async def test_several_calls_and_text_beside_them(make):
    text = f"Let me look.\n{CALL}\n" + '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    client = make(text)
    result = await both(client, tools=[WEATHER, ADD])
    assert [call.name for call in result.content] == ["weather", "add"]
    assert len({call.id for call in result.content}) == 2
    assert result.thought == "Let me look."
    strings, _ = await read(client.create_stream(HELLO, tools=[WEATHER, ADD]))
    assert "".join(strings) == "Let me look."
    one = await both(make(text, parallel_tool_calls=False), tools=[WEATHER, ADD])
    assert [call.name for call in one.content] == ["weather"]


async def test_plain_schemas_are_tools_too(make):
    schema = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    result = await both(make(CALL), tools=[schema])
    assert result.content[0].name == "weather"
    bare = await both(make('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'), tools=[{"name": "now"}])
    assert json.loads(bare.content[0].arguments) == {}


async def test_tool_choices(make):
    client = make(None)

    async def ask(**kwargs):
        await client.create(HELLO, tools=[WEATHER, ADD], **kwargs)
        return fake(client).requests[-1]

    auto, none = await ask(), await ask(tool_choice="none")
    required, named = await ask(tool_choice="required"), await ask(tool_choice=ADD)
    assert auto.sampling.structured_output is None and "The weather of a city." in auto.prompt.text
    assert none.sampling.structured_output is None
    forced = json.dumps(required.sampling.structured_output)
    assert "weather" in forced and "add" in forced
    only = json.dumps(named.sampling.structured_output)
    assert "add" in only and "weather" not in only
    result = await client.create(HELLO, tools=[WEATHER, ADD], tool_choice=ADD)
    assert [call.name for call in result.content] == ["add"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tools": [WEATHER], "tool_choice": ADD}, "'add', which is not in the provided tools: weather"),
        ({"tool_choice": ADD}, "no tools are provided"),
        ({"tools": [WEATHER], "tool_choice": "weather"}, "tool_choice='weather' is not understood"),
        ({"tool_choice": "required"}, "at least one tool"),
        ({"tools": [{"name": "with space"}]}, "tool name 'with space' is not valid"),
        ({"tools": [{"name": "x" * 65}]}, "is not valid"),
        ({"tools": [{}]}, "tool name '' is not valid"),
        ({"tools": [WEATHER], "tool_choice": "required", "json_output": Answer}, "cannot be combined"),
    ],
)
async def test_tools_are_validated(make, kwargs, message):
    client = make(ANSWER)
    with pytest.raises(ValueError, match=message):
        await client.create(HELLO, **kwargs)
    with pytest.raises(ValueError, match=message):
        await read(client.create_stream(HELLO, **kwargs))


async def test_function_calling_switched_off(make):
    client = make(ANSWER, model_info={"function_calling": False})
    with pytest.raises(ValueError, match="function_calling=False"):
        await client.create(HELLO, tools=[WEATHER])


async def test_calls_and_results_come_back_into_the_prompt(make):
    client = make("Sunny.")
    history = [
        *HELLO,
        AssistantMessage(
            content=[FunctionCall(id="c1", name="weather", arguments='{"city": "Rouen"}')],
            thought="Let me look.",
            source="solver",
        ),
        FunctionExecutionResultMessage(
            content=[
                FunctionExecutionResult(content="sunny", name="weather", call_id="c1"),
                FunctionExecutionResult(content="it failed", name="weather", call_id="c2", is_error=True),
            ]
        ),
    ]
    await client.create(history, tools=[WEATHER])
    text = fake(client).requests[0].prompt.text
    order = [text.index(part) for part in ("Let me look.", '"arguments": {"city": "Rouen"}', "sunny", "it failed")]
    assert order == sorted(order)


async def test_a_cut_or_broken_call_is_reported_as_it_is(make):
    broken = await both(make('<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'), tools=[WEATHER])
    assert broken.content[0].arguments.startswith('{"city": "Ro')
    cut = await both(make(CALL), tools=[WEATHER], extra_create_args={"max_tokens": 12})
    assert cut.finish_reason == "length"
    strange = await both(make(CALL.replace('"weather"', '"the weather"')), tools=[WEATHER])
    assert strange.content[0].name == "the_weather"


# ---- JSON ----------------------------------------------------------------------------------------------------------


async def test_json_mode(make):
    client = make('{"a": 1}')
    result = await both(client, json_output=True)
    assert json.loads(result.content) == {"a": 1}
    assert fake(client).requests[0].sampling.structured_output == {"json_object": True}
    await client.create(HELLO, json_output=False, extra_create_args={"response_format": {"type": "json_object"}})
    assert fake(client).requests[-1].sampling.structured_output is None


async def test_structured_output(make):
    client = make(None)
    result = await both(client, json_output=Answer)
    assert isinstance(Answer.model_validate_json(result.content), Answer)
    assert fake(client).requests[0].sampling.structured_output == {"json": Answer.model_json_schema()}


@pytest.mark.parametrize(
    "response_format",
    [Answer, {"type": "json_schema", "json_schema": {"name": "Answer", "schema": Answer.model_json_schema()}}],
)
async def test_structured_output_by_response_format(make, response_format):
    client = make(None)
    await both(client, extra_create_args={"response_format": response_format})
    assert fake(client).requests[0].sampling.structured_output == {"json": Answer.model_json_schema()}


async def test_structured_output_beside_tools(make):
    client = make('{"value": 3}')
    result = await both(client, tools=[WEATHER], json_output=Answer)
    assert Answer.model_validate_json(result.content).value == 3
    called = await both(make(CALL), tools=[WEATHER], json_output=Answer)
    assert called.content[0].name == "weather"


async def test_vllm_structured_outputs(make):
    client = make("yes")
    await client.create(HELLO, extra_create_args={"structured_outputs": {"choice": ["yes", "no"]}})
    assert fake(client).requests[0].sampling.structured_output == {"choice": ["yes", "no"]}


@pytest.mark.parametrize(
    ("settings", "kwargs", "message"),
    [
        ({}, {"json_output": "yes"}, "json_output must be a bool"),
        ({}, {"json_output": dict}, "json_output must be a bool"),
        ({}, {"extra_create_args": {"response_format": {"type": "xml"}}}, "response_format"),
        ({"model_info": {"json_output": False}}, {"json_output": True}, "json_output=False"),
        ({"model_info": {"structured_output": False}}, {"json_output": Answer}, "structured_output=False"),
    ],
)
async def test_json_arguments_are_validated(make, settings, kwargs, message):
    with pytest.raises(ValueError, match=message):
        await make(ANSWER, **settings).create(HELLO, **kwargs)


# ---- thinking ------------------------------------------------------------------------------------------------------

THOUGHT = "The user asks about a river. I know this one."


async def test_thinking_is_the_thought(make_thinking):
    client = make_thinking(f"{THOUGHT}\n</think>\n\n{ANSWER}")
    result = await both(client)
    assert (result.content, result.thought) == (ANSWER, THOUGHT)
    strings, _ = await read(client.create_stream(HELLO))
    assert "".join(strings) == f"<think>{THOUGHT}</think>{ANSWER}"
    assert strings[0].startswith("<think>") and "</think>" in strings


async def test_thinking_that_never_ends(make_thinking):
    client = make_thinking(THOUGHT)
    result = await both(client, extra_create_args={"max_tokens": 20})
    assert (result.content, result.finish_reason) == ("", "length")
    assert THOUGHT.startswith(result.thought)
    strings, _ = await read(client.create_stream(HELLO))
    assert strings[-1] == "</think>"


async def test_earlier_thinking_reaches_the_template(make_thinking):
    client = make_thinking("x</think>ok")
    await client.create([*HELLO, AssistantMessage(content=ANSWER, thought=THOUGHT, source="a"), HELLO[1]])
    assert f"<think>{THOUGHT}</think>{ANSWER}" in fake(client).requests[0].prompt.text


async def test_thinking_and_text_beside_calls_are_told_apart_when_they_come_back(make_thinking):
    """AutoGen has one field for both."""
    client = make_thinking(f"{THOUGHT}</think>Let me look.\n{CALL}")
    result = await client.create(HELLO, tools=[WEATHER])
    assert result.thought == f"{THOUGHT}\n\nLet me look."
    said = AssistantMessage(content=result.content, thought=result.thought, source="a")
    await client.create([*HELLO, said], tools=[WEATHER])
    assert f"<think>{THOUGHT}</think>Let me look.\n<tool_call>" in fake(client).requests[1].prompt.text
    other = make_thinking("x</think>ok")
    await other.create([*HELLO, said], tools=[WEATHER])
    assert f"assistant\n{THOUGHT}\n\nLet me look.\n<tool_call>" in fake(other).requests[0].prompt.text


# ---- system messages -------------------------------------------------------------------------------------------------

SEVERAL = [SystemMessage(content="First."), SystemMessage(content="Second."), HELLO[1], SystemMessage(content="Third.")]


async def test_several_system_messages_stay_apart(make):
    client = make(ANSWER)
    assert client.model_info["multiple_system_messages"] is True
    await client.create(SEVERAL)
    text = fake(client).requests[0].prompt.text
    assert text.count("system\n") == 3
    assert [text.index(part) for part in ("First.", "Second.", "Where", "Third.")] == sorted(
        text.index(part) for part in ("First.", "Second.", "Where", "Third.")
    )


@pytest.mark.parametrize(
    "settings", [{"model_info": {"multiple_system_messages": False}}, {"template": LAST_SYSTEM_ONLY}]
)
async def test_several_system_messages_are_merged_where_only_one_is_read(make, settings):
    """By override, or because the template silently drops all but one."""
    if "template" in settings:
        settings = {"template": byte_tokenizer(settings["template"])}
    client = make(ANSWER, **settings)
    await client.create(SEVERAL)
    assert "First.\nSecond.\nThird." in fake(client).requests[0].prompt.text
    await client.create(HELLO)
    assert "You are brief." in fake(client).requests[1].prompt.text


async def test_several_system_messages_on_a_strict_template(make):
    client = make(ANSWER, template=byte_tokenizer(STRICT))
    await client.create([*SEVERAL, UserMessage(content="And why?", source="critic")])
    text = fake(client).requests[0].prompt.text
    assert all(part in text for part in ("First.", "Second.", "Third.", "Where does", "And why?"))


# ---- counting --------------------------------------------------------------------------------------------------------


async def test_count_tokens_is_what_the_prompt_has(make):
    client = make(ANSWER, engine={"max_model_len": 4096})
    assert client.count_tokens([]) == 0
    for messages, tools in ((HELLO, []), (HELLO, [WEATHER, ADD]), (SEVERAL, [])):
        await client.create(messages, tools=tools)
        used = len(fake(client).requests[-1].prompt.token_ids)
        assert client.count_tokens(messages, tools=tools) == used
        assert client.remaining_tokens(messages, tools=tools) == 4096 - used


# ---- the client itself -----------------------------------------------------------------------------------------------


def test_model_info_and_overrides():
    info = KVCommChatCompletionClient(model="some/local-model").model_info
    assert info == {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
        "family": "unknown",
        "multiple_system_messages": True,
    }
    client = KVCommChatCompletionClient(model="x", model_info={"family": "qwen", "json_output": False})
    assert client.model_info["family"] == "qwen" and client.model_info["json_output"] is False
    assert client.capabilities == {"vision": False, "function_calling": True, "json_output": False}
    with pytest.raises(ValueError, match="vision"):
        KVCommChatCompletionClient(model="x", model_info={"vision": True})


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "r1"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral"),
        ("mistralai/Ministral-8B-Instruct-2410", "ministral"),
        ("Qwen/Qwen2.5-1.5B-Instruct", "unknown"),
        ("/models/r1/my-model", "unknown"),
    ],
)
def test_family_by_name(model, family):
    assert KVCommChatCompletionClient(model=model).model_info["family"] == family


def test_settings_are_validated():
    with pytest.raises(ConfigurationError, match=r"temprature is unknown; known are .*temperature"):
        KVCommChatCompletionClient(model="x", temprature=1)
    with pytest.raises(ConfigurationError, match="model"):
        KVCommChatCompletionClient()
    with pytest.raises(ConfigurationError, match="policyy"):
        KVCommChatCompletionClient(model="x", reuse={"policyy": "ridge"})


def test_errors_do_not_show_secrets():
    with pytest.raises(ConfigurationError) as caught:
        KVCommChatCompletionClient(model="x", apikey="very-secret", api_key=["very-secret"])
    assert "apikey" in str(caught.value) and "very-secret" not in str(caught.value)


def test_a_named_parser_overrides_what_the_template_says(make):
    named = tool_format_of(make(ANSWER, tool_parser="mistral", reasoning_parser="deepseek_r1")._config)
    assert (named.tool_parser, named.reasoning_parser) == ("mistral", "deepseek_r1")
    assert tool_format_of(make(ANSWER)._config) is None


# ---- reports and events ----------------------------------------------------------------------------------------------


async def test_report_and_event_of_a_call(make, events):
    client = make(ANSWER)
    assert client.last_report is None
    await client.create(HELLO, tools=[WEATHER])
    (event,) = events
    assert type(event).__name__ == "LLMCallEvent"
    fields = json.loads(str(event))
    assert fields["type"] == "LLMCall" and fields["model"] == "fake"
    assert fields["kvcomm"] == client.last_report.model_dump(mode="json")
    assert fields["kvcomm"]["prompt_tokens"] == event.prompt_tokens == fields["prompt_tokens"]
    assert event.completion_tokens > 0
    assert fields["response"]["content"] == ANSWER
    assert fields["messages"][1] == {"role": "user", "name": "user", "content": HELLO[1].content}
    assert fields["tools"][0]["function"]["name"] == "weather"
    assert fields["ttft_ms"] is not None
    await client.create(HELLO, tools=[WEATHER])
    assert client.last_report.exact > 0
    assert events[1].kwargs["kvcomm"]["exact"] == client.last_report.exact


async def test_events_of_a_stream(make, events):
    client = make(ANSWER)
    await read(client.create_stream(HELLO, extra_create_args={"logprobs": 1}))
    start, end = events
    assert [type(event).__name__ for event in events] == ["LLMStreamStartEvent", "LLMStreamEndEvent"]
    assert json.loads(str(start))["messages"][0]["content"] == "You are brief."
    fields = json.loads(str(end))
    assert fields["kvcomm"] == client.last_report.model_dump(mode="json")
    assert fields["completion_tokens"] > 0 and fields["response"]["content"] == ANSWER


async def test_a_failed_call_leaves_no_report(make, events):
    client = make(EngineError("lost"), max_retries=0)
    with pytest.raises(EngineError):
        await client.create(HELLO)
    assert events == [] and client.last_report is None
