"""bind_tools: every form of tool and choice, parallel calls, strictness, streaming, history."""

from __future__ import annotations

import json

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from lc_helpers import fake
from pydantic import BaseModel

from kvcomm_integrations.errors import ConfigurationError


@tool
def weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


class Clock(BaseModel):
    """The time in a zone."""

    zone: str


TOOLS = [weather, Clock]


def block(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tag(request):
    constraint = request.sampling.structured_output
    return json.loads(constraint["structural_tag"])["format"] if constraint else None


def tag_names(form):
    return [t["begin"].split('"')[3] for t in form["tags"]]


def test_tools_reach_the_template_and_calls_come_back(make_tools):
    model = make_tools("Let me see.\n" + block("weather", city="Paris"))
    result = model.bind_tools(TOOLS).invoke("weather?")
    text = fake(model).requests[0].prompt.text
    assert '"name": "weather"' in text and '"name": "Clock"' in text
    assert result.content == "Let me see."
    (call,) = result.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"}) and call["id"].startswith("call_")
    assert result.response_metadata["finish_reason"] == "tool_calls"
    assert tag(fake(model).requests[0]) is None


def test_templates_without_tools_get_them_as_text(make):
    model = make(block("weather", city="Paris"))
    result = model.bind_tools(TOOLS).invoke([("system", "You are brief."), ("human", "weather?")])
    text = fake(model).requests[0].prompt.text
    assert '"name": "weather"' in text and "You are brief." in text and text.count("system\n") == 1
    assert result.tool_calls[0]["name"] == "weather"
    history = [HumanMessage("weather?"), result, ToolMessage("sunny", tool_call_id=result.tool_calls[0]["id"])]
    model.bind_tools(TOOLS).invoke(history)
    again = fake(model).requests[1].prompt.text
    assert '{"name": "weather", "arguments": {"city": "Paris"}}' in again and "sunny" in again


def test_calls_and_results_in_the_history(make_tools):
    model = make_tools("It is sunny.")
    call = {"id": "c1", "name": "weather", "args": {"city": "Paris"}}
    result = "A long tool result, the same for everyone who reads it: sunny, 21 degrees, light wind from the west."
    history = [HumanMessage("weather?"), AIMessage("", tool_calls=[call]), ToolMessage(result, tool_call_id="c1")]
    model.bind_tools(TOOLS).invoke(history)
    request = fake(model).requests[0]
    assert '{"name": "weather", "arguments": {"city": "Paris"}}' in request.prompt.text
    assert "tool:weather:result" in [segment.name for segment in request.prompt.segments]


@pytest.mark.parametrize("choice", ["any", "required", True])
def test_a_call_can_be_forced(make_tools, choice):
    model = make_tools()
    result = model.bind_tools(TOOLS, tool_choice=choice).invoke("q")
    form = tag(fake(model).requests[0])
    assert form["type"] == "tags_with_separator" and form["at_least_one"] and not form["stop_after_first"]
    assert tag_names(form) == ["weather", "Clock"]
    assert result.tool_calls[0]["name"] == "weather"
    assert result.content == ""


@pytest.mark.parametrize("choice", ["Clock", {"type": "function", "function": {"name": "Clock"}}])
def test_one_tool_can_be_forced(make_tools, choice):
    model = make_tools()
    result = model.bind_tools(TOOLS, tool_choice=choice).invoke("q")
    form = tag(fake(model).requests[0])
    assert tag_names(form) == ["Clock"] and form["stop_after_first"]
    assert [(c["name"], c["args"]) for c in result.tool_calls] == [("Clock", {"zone": "text"})]


@pytest.mark.parametrize("choice", ["none", False])
def test_calls_can_be_forbidden(make_tools, choice):
    model = make_tools("plain")
    assert model.bind_tools(TOOLS, tool_choice=choice).invoke("q").content == "plain"
    assert "weather" not in fake(model).requests[0].prompt.text


@pytest.mark.parametrize("choice", [None, "auto"])
def test_calls_are_optional_by_default(make_tools, choice):
    model = make_tools("plain")
    assert model.bind_tools(TOOLS, tool_choice=choice).invoke("q").content == "plain"
    assert tag(fake(model).requests[0]) is None


def test_a_choice_without_its_tool_is_refused_at_once(make_tools):
    with pytest.raises(ConfigurationError, match=r"'wether'.*weather, Clock"):
        make_tools().bind_tools(TOOLS, tool_choice="wether")
    with pytest.raises(ConfigurationError, match="at least one tool"):
        make_tools().bind_tools([], tool_choice="any")


def test_a_tool_may_be_called_any(make_tools):
    model = make_tools()
    named_any = {"type": "function", "function": {"name": "any", "parameters": {"type": "object", "properties": {}}}}
    model.bind_tools([named_any, Clock], tool_choice="any").invoke("q")
    assert tag_names(tag(fake(model).requests[0])) == ["any"]


def test_strict_constrains_optional_calls(make_tools):
    model = make_tools("plain")
    model.bind_tools(TOOLS, strict=True).invoke("q")
    form = tag(fake(model).requests[0])
    assert form["type"] == "triggered_tags" and form["triggers"] == ["<tool_call>"]
    assert form["tags"][0]["content"]["json_schema"]["required"] == ["city"]


def test_parallel_calls(make_tools):
    text = "\n".join([block("weather", city="Paris"), block("weather", city="Rome"), block("Clock", zone="CET")])
    many = make_tools(text).bind_tools(TOOLS).invoke("q")
    assert [c["args"] for c in many.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}, {"zone": "CET"}]
    assert len({c["id"] for c in many.tool_calls}) == 3
    assert many.content == ""
    one = make_tools(text).bind_tools(TOOLS, parallel_tool_calls=False).invoke("q")
    assert [c["args"] for c in one.tool_calls] == [{"city": "Paris"}]
    model = make_tools()
    model.bind_tools(TOOLS, tool_choice="any", parallel_tool_calls=False).invoke("q")
    assert tag(fake(model).requests[0])["stop_after_first"]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_streamed_calls_come_as_fragments(make_tools, size):
    text = "Thinking aloud. " + block("weather", city="Pärïs", days=2) + "\n" + block("Clock", zone='a"b}{')
    model = make_tools(text, engine={"delta_tokens": size}).bind_tools(TOOLS)
    chunks = list(model.stream("q"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.content == "Thinking aloud."
    assert "<" not in "".join(chunk.text for chunk in chunks)
    assert [(c["name"], c["args"]) for c in total.tool_calls] == [
        ("weather", {"city": "Pärïs", "days": 2}), ("Clock", {"zone": 'a"b}{'}),
    ]  # fmt: skip
    fragments = [f for chunk in chunks for f in chunk.tool_call_chunks]
    if size == 1:
        assert len(fragments) > 20
    assert [f["name"] for f in fragments if f["name"]] == ["weather", "Clock"]
    assert all((f["id"] is None) == (f["name"] is None) for f in fragments)
    assert {f["index"] for f in fragments} == {0, 1}


def test_a_call_cut_off_by_the_limit_is_reported_as_invalid(make_tools):
    model = make_tools(block("weather", city="Paris"), max_tokens=50)
    result = model.bind_tools(TOOLS).invoke("q")
    assert result.tool_calls == [] or result.tool_calls[0]["args"] != {"city": "Paris"}
    assert result.response_metadata["finish_reason"] == "length"


def test_without_tools_nothing_is_parsed(make_tools):
    text = block("weather", city="Paris")
    result = make_tools(text).invoke("q")
    assert result.content == text and result.tool_calls == []


def test_the_text_beside_a_call_is_registered(make_tools):
    model = make_tools("I shall look at the weather first.\n" + block("weather", city="Paris"), session="s", agent="a")
    result = model.bind_tools(TOOLS).invoke("q")
    content = model.runtime.registry.lookup("s", result.response_metadata["kvcomm"]["segment_id"])
    assert content.text == "I shall look at the weather first."
    assert model.engine.tokenizer.decode(content.token_ids) == content.text
    only = make_tools(block("weather", city="Paris")).bind_tools(TOOLS).invoke("q")
    assert only.response_metadata["kvcomm"]["segment_id"] is None


def test_tools_and_a_response_format_together(make_tools):
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    model = make_tools([None, block("weather", city="Paris")])
    bound = model.bind_tools(TOOLS, response_format=response_format)
    assert json.loads(bound.invoke("q").content) == {"answer": 3}
    assert bound.invoke("q").tool_calls[0]["name"] == "weather"
    form = tag(fake(model).requests[0])
    assert form["type"] == "or" and form["elements"][1]["json_schema"] == schema
    with pytest.raises(ConfigurationError, match="cannot be combined"):
        model.bind_tools(TOOLS, tool_choice="any", response_format=response_format).invoke("q")


@pytest.mark.parametrize("cut", ["{", '{"city": "Par', "", "[1]"])
async def test_a_call_that_was_cut_off_is_never_run(make_tools, cut):
    whole = block("weather", city="Rome")
    text = whole + '\n<tool_call>\n{"name": "weather", "arguments": ' + cut
    for answer in (
        make_tools(text).bind_tools(TOOLS).invoke("weather?"),
        await make_tools(text).bind_tools(TOOLS).ainvoke("weather?"),
    ):
        assert [call["args"] for call in answer.tool_calls if call["args"]] == [{"city": "Rome"}]
        assert all(call["args"] or cut == "" for call in answer.tool_calls)
