"""What a model writes in place of a call is an invalid call on every path: no raw tags in the content, nothing run."""

from __future__ import annotations

from functools import reduce
from operator import add

import pytest

TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
]
BROKEN = {
    "a Python dict": ("{'name': 'weather', 'arguments': {'city': 'Paris'}}", "weather"),
    "a missing name": ('{"arguments": {"city": "Paris"}}', ""),
    "name null": ('{"name": null, "arguments": {"city": "Paris"}}', ""),
    "an empty name": ('{"name": "", "arguments": {"city": "Paris"}}', ""),
    "a name elsewhere": ('{"name": null, "arguments": {"name": "weather"}}', ""),
    "a number as name": ('{"name": 7, "arguments": {}}', ""),
    "an array": ('[{"name": "weather", "arguments": {}}]', "weather"),
    "prose": ("I would call the weather.", ""),
    "nothing": ("", ""),
}


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(("payload", "name"), BROKEN.values(), ids=BROKEN)
def test_a_payload_that_is_no_call_is_invalid(make_tools, payload, name, size):
    text = f"Look:\n<tool_call>\n{payload}\n</tool_call>"
    model = make_tools(text, engine={"delta_tokens": size}).bind_tools(TOOLS)
    whole = model.invoke("q")
    summed = reduce(add, model.stream("q"))
    for message in (whole, summed):
        assert message.content == "Look:"
        assert message.tool_calls == []
        (invalid,) = message.invalid_tool_calls
        assert (invalid["name"] or "") == name
    assert whole.invalid_tool_calls[0]["error"]


BROKEN_ARGUMENTS = ["{'city': 'Paris'}", "{'city': 'Par", '["Paris"]', '"Paris"', '{"city": Paris}']


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("arguments", BROKEN_ARGUMENTS)
def test_broken_arguments_are_the_same_whether_streamed_or_not(make_tools, arguments, size):
    text = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}\n</tool_call>'
    model = make_tools(text, engine={"delta_tokens": size}).bind_tools(TOOLS)
    whole = model.invoke("q")
    summed = reduce(add, model.stream("q"))
    assert whole.tool_calls == summed.tool_calls == []
    assert whole.content == summed.content == ""
    assert whole.invalid_tool_calls[0]["args"] == summed.invalid_tool_calls[0]["args"]
    assert "</tool_call>" not in whole.invalid_tool_calls[0]["args"]


def test_a_tag_that_is_only_spoken_of_stays_text(make_tools):
    text = "I would write <tool_call> first."
    result = make_tools(text).bind_tools(TOOLS).invoke("q")
    assert result.content.replace(" ", "") == text.replace(" ", "") and result.invalid_tool_calls == []
