"""Faults that users of chat models have reported elsewhere: the right behaviour, one kind per test.

Each name says what goes right; the docstring says what went wrong.
"""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from lc_helpers import details, fake
from pydantic import BaseModel

THINKING = {"enable_thinking": True}
THOUGHT = "First, the user wants a number. Then I count."


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}, with a light wind from the west and a few clouds over the hills."


class Answer(BaseModel):
    """The answer."""

    value: int


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def total(chunks):
    result = chunks[0]
    for chunk in chunks[1:]:
        result += chunk
    return result


def one_node_graph(model, **kwargs):
    def writer(state):
        return {"messages": [model.invoke(state["messages"], **kwargs)]}

    builder = StateGraph(MessagesState)
    builder.add_node("writer", writer)
    builder.add_edge(START, "writer")
    builder.add_edge("writer", END)
    return builder.compile()


@pytest.mark.parametrize("text", [f"{THOUGHT}\n</think>\n\nIt is 3.", f"<think>\n{THOUGHT}\n</think>\n\nIt is 3."])
async def test_reasoning_of_a_local_model_is_returned(make_tools, text):
    """reasoning_content of a local vLLM was dropped."""
    model = make_tools(text, chat_template_kwargs={"enable_thinking": not text.startswith("<think>")})
    streamed = [chunk async for chunk in model.astream("q")]
    for result in (model.invoke("q"), await model.ainvoke("q"), total(list(model.stream("q"))), total(streamed)):
        assert result.content == "It is 3."
        assert result.additional_kwargs["reasoning_content"] == THOUGHT
        assert [block["type"] for block in result.content_blocks] == ["reasoning", "text"]
        assert result.usage_metadata["output_token_details"]["reasoning"] > 0


def test_streamed_thinking_is_not_empty_chunks(make_tools):
    """Streaming thinking arrived as empty chunks."""
    model = make_tools(f"{THOUGHT}</think>It is 3.", chat_template_kwargs=THINKING)
    chunks = list(model.stream("q"))
    thinking = [c for c in chunks if c.additional_kwargs.get("reasoning_content")]
    assert len(thinking) > 5
    assert "".join(c.additional_kwargs["reasoning_content"] for c in thinking) == THOUGHT
    assert all(c.content or c.additional_kwargs or c.usage_metadata for c in chunks)


def test_incoming_reasoning_reaches_the_template(make_tools):
    """reasoning_content in the history was silently dropped before rendering."""
    from lc_helpers import byte_tokenizer

    from kvcomm_integrations.engines.fake import FakeEngine
    from kvcomm_integrations.langchain import ChatKVComm

    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
        "{{ m.content }}\n{% endfor %}"
    )
    model = ChatKVComm(model="fake", engine=FakeEngine(byte_tokenizer(template), "ok"))
    model.invoke([HumanMessage("a"), AIMessage("b", additional_kwargs={"reasoning_content": "why"}), HumanMessage("c")])
    assert "assistant:[why]b" in fake(model).requests[0].prompt.text


async def test_a_stream_is_many_pieces(make):
    """stream returned one block."""
    model = make("one two three four five six seven eight nine ten")
    assert len([c for c in model.stream("q") if c.content]) >= 5
    assert len([c async for c in model.astream("q") if c.content]) >= 5
    pieces = list(one_node_graph(model).stream({"messages": [HumanMessage("q")]}, stream_mode="messages"))
    assert len([c for c, _ in pieces if c.content]) >= 5


@pytest.mark.parametrize("strategy", [ProviderStrategy, ToolStrategy])
def test_tools_and_a_response_format_work_together(make_tools, strategy):
    """bind_tools together with response_format was rejected."""

    def script(request):
        if "It is sunny in Paris" not in request.prompt.text:
            return CALL
        if strategy is ToolStrategy:
            return '<tool_call>\n{"name": "Answer", "arguments": {"value": 3}}\n</tool_call>'
        return json.dumps({"value": 3})

    agent = create_agent(make_tools(script), [weather], response_format=strategy(Answer))
    result = agent.invoke({"messages": [HumanMessage("How sunny is it in Paris, as a number?")]})
    assert result["structured_response"] == Answer(value=3)
    assert [m.type for m in result["messages"]][:3] == ["human", "ai", "tool"]


def test_a_response_format_alone_picks_what_the_model_can_do(make_tools):
    """The automatic choice between provider and tool strategy has to end in a parsed answer."""
    agent = create_agent(make_tools(json.dumps({"value": 3})), [weather], response_format=Answer)
    assert agent.invoke({"messages": [HumanMessage("q")]})["structured_response"] == Answer(value=3)


@pytest.mark.parametrize("mode", ["messages", ["values", "messages"], ["updates", "messages"]])
def test_usage_survives_every_stream_mode(make, mode):
    """Usage was lost with stream_mode=["values", "messages"]."""
    model = make("one two three four five")
    app = one_node_graph(model)
    plain = app.invoke({"messages": [HumanMessage("q")]})["messages"][-1]
    events = list(app.stream({"messages": [HumanMessage("q")]}, stream_mode=mode))
    if mode == "messages":
        events = [("messages", event) for event in events]
    chunks = [event[0] for kind, event in events if kind == "messages"]
    assert total(chunks).usage_metadata["output_tokens"] == plain.usage_metadata["output_tokens"]
    for kind, event in events:
        if kind == "values" and len(event["messages"]) > 1:
            assert event["messages"][-1].usage_metadata["output_tokens"] == plain.usage_metadata["output_tokens"]


def test_streamed_usage_is_counted_once(make):
    """Streaming added usage up over chunks and gave wrong numbers."""
    model = make("one two three four five")
    model.invoke("q")
    plain = model.invoke("q")
    chunks = list(model.stream("q"))
    assert total(chunks).usage_metadata == plain.usage_metadata
    assert sum(bool(chunk.usage_metadata) for chunk in chunks) == 1


@pytest.mark.parametrize("size", [1, 2, 5, 11])
def test_a_streamed_call_is_never_emitted_as_text(make_tools, size):
    """A streamed tool call came out as raw text when its tag was split over deltas."""
    model = make_tools("I look.\n" + CALL, engine={"delta_tokens": size}).bind_tools([weather])
    chunks = list(model.stream("q"))
    assert "".join(chunk.text for chunk in chunks) == "I look."
    assert total(chunks).tool_calls[0]["args"] == {"city": "Paris"}


@pytest.mark.parametrize("text", ['{"value": 3}', f'{THOUGHT}</think>{{"value": 3}}'])
def test_structured_output_of_a_thinking_model_is_content(make_tools, text):
    """Structured output together with reasoning: the JSON landed in the reasoning."""
    model = make_tools(text, chat_template_kwargs=THINKING)
    raw = model.with_structured_output(Answer, include_raw=True).invoke("q")
    assert raw["parsed"] == Answer(value=3)
    assert raw["raw"].content == '{"value": 3}'
    streamed = list(model.with_structured_output(Answer).stream("q"))
    assert streamed[-1] == Answer(value=3)


def test_bind_tools_is_there(make_tools):
    """bind_tools raised NotImplementedError, so prebuilt agents failed."""
    agent = create_agent(make_tools([CALL, "Sunny."]), [weather])
    result = agent.invoke({"messages": [HumanMessage("q")]})
    assert [m.type for m in result["messages"]] == ["human", "ai", "tool", "ai"]
    assert result["messages"][-1].content == "Sunny."


@pytest.mark.parametrize("fixture", ["make", "make_tools"])
def test_tools_reach_the_model_whatever_its_template(fixture, request):
    """Tools were never triggered, because the template had never shown them to the model."""
    model = request.getfixturevalue(fixture)([CALL, "Sunny."])
    create_agent(model, [weather]).invoke({"messages": [HumanMessage("q")]})
    first, second = fake(model).requests
    assert "The weather of a city." in first.prompt.text
    assert "It is sunny in Paris" in second.prompt.text and '"arguments": {"city": "Paris"}' in second.prompt.text


def test_a_conversation_of_many_rounds_hits_the_prefix_cache(make):
    """The hit rate was 0 in a multi-round chat: the next round's tokens did not repeat the last round's."""
    model = make("A long answer with many words, so that it spans more than just one block of the cache.")
    history = [HumanMessage("What do you think about this question, and what would others think about it?")]
    for _ in range(3):
        answer = model.invoke(history)
        history += [answer, HumanMessage("And why is that so? Explain it in more detail, please, step by step.")]
    requests = fake(model).requests
    for before, after in pairwise(requests):
        size = len(before.prompt.token_ids)
        assert after.prompt.token_ids[:size] == before.prompt.token_ids
    assert details(answer)["cache_read"] > 0.5 * answer.usage_metadata["input_tokens"]


def test_a_tool_result_is_shared_between_agents(make_tools):
    """The point of it all: what one agent has read, the next one loads."""
    model = make_tools("ok", session="s")
    call = {"id": "c1", "name": "weather", "args": {"city": "Paris"}}
    history = [
        HumanMessage("q"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("It is sunny in Paris. " * 8, tool_call_id="c1"),
    ]
    model.bind(kvcomm={"agent": "one"}).invoke([("system", "You are one."), *history])
    second = model.bind(kvcomm={"agent": "two"}).invoke([("system", "You are somebody else."), *history])
    assert second.response_metadata["kvcomm"]["loaded"] > 0
    assert next(s for s in model.last_report.segments if s.name == "tool:weather:result").loaded > 0
