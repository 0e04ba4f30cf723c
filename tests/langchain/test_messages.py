"""Conversions between LangChain messages and chat messages."""

from __future__ import annotations

import pytest
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.langchain.messages import to_chat_messages


def one(message):
    return to_chat_messages([message])[0]


def test_roles():
    converted = to_chat_messages(
        [
            SystemMessage("s"),
            HumanMessage("h", name="anna"),
            AIMessage("a", name="bob"),
            ToolMessage("t", tool_call_id="1", name="search"),
            FunctionMessage(content="f", name="old"),
            ChatMessage(role="critic", content="c"),
        ]
    )
    assert [(m.role, m.content, m.name) for m in converted] == [
        ("system", "s", None), ("user", "h", "anna"), ("assistant", "a", "bob"), ("tool", "t", "search"),
        ("tool", "f", "old"), ("critic", "c", None),
    ]  # fmt: skip


def test_text_blocks_are_joined_without_anything_between():
    blocks = ["one ", {"type": "text", "text": "two"}, {"text": " three"}]
    assert one(HumanMessage(blocks)).content == "one two three"


def test_whitespace_is_kept():
    assert one(HumanMessage("  a\n\n b \n")).content == "  a\n\n b \n"


@pytest.mark.parametrize(
    "message",
    [
        AIMessage("x", additional_kwargs={"reasoning_content": "hmm"}),
        AIMessage([{"type": "reasoning", "reasoning": "hmm"}, {"type": "text", "text": "x"}]),
        AIMessage([{"type": "thinking", "thinking": "hmm"}, {"type": "text", "text": "x"}]),
        AIMessage(content_blocks=[{"type": "reasoning", "reasoning": "hmm"}, {"type": "text", "text": "x"}]),
    ],
)
def test_reasoning_is_kept_apart(message):
    assert (one(message).content, one(message).reasoning) == ("x", "hmm")


def test_tool_calls_and_results_find_each_other():
    call = {"id": "c1", "name": "search", "args": {"q": "x"}}
    assistant, result = to_chat_messages(
        [
            AIMessage([{"type": "tool_use", "id": "c1", "name": "search", "input": {}}], tool_calls=[call]),
            ToolMessage("found", tool_call_id="c1"),
        ]
    )
    assert assistant.content == ""
    assert assistant.tool_calls == (
        {"id": "c1", "type": "function", "function": {"name": "search", "arguments": {"q": "x"}}},
    )
    assert (result.name, result.tool_call_id) == ("search", "c1")


def test_calls_that_could_not_be_parsed_stay_in_the_history():
    bad = {"id": "c1", "name": "search", "args": '{"q": ', "error": "no JSON", "type": "invalid_tool_call"}
    assert one(AIMessage("", invalid_tool_calls=[bad])).tool_calls[0]["function"]["arguments"] == '{"q": '


def test_segment_id_is_read_back():
    message = AIMessage("x", response_metadata={"kvcomm": {"segment_id": "abc", "report": {}}})
    assert one(message).segment_id == "abc"
    assert one(AIMessage("x", response_metadata={"kvcomm": "other"})).segment_id is None


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image", "base64": "AAAA", "mime_type": "image/png"},
        {"type": "audio", "base64": "AAAA", "mime_type": "audio/wav"},
        {"type": "file", "base64": "AAAA", "mime_type": "application/pdf"},
    ],
)
def test_what_a_text_model_cannot_read_is_refused(block, make):
    with pytest.raises(ConfigurationError, match=rf"human.*{block['type']}.*text blocks only"):
        make().invoke([HumanMessage([{"type": "text", "text": "what is this?"}, block])])


def test_messages_that_are_instructions_to_the_graph_are_refused():
    with pytest.raises(ConfigurationError, match="RemoveMessage"):
        one(RemoveMessage(id="1"))
