from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.prompts.arranging import arrange
from kvcomm_integrations.prompts.chat_message import (
    ChatMessage,
    Turn,
    clean_text,
    core_span,
    shared_name,
    tool_names,
)

from .conversations import CALL


def refusing(*, roles: set[str] = frozenset(), repeats: bool = False, late_system: bool = False) -> Callable[..., str]:
    """A template that refuses some roles, repeated roles, or system messages that are not first."""

    def render(dicts: Sequence[dict[str, Any]]) -> str:
        order = [d["role"] for d in dicts]
        if roles & set(order):
            raise ConfigurationError("role")
        if repeats and any(a == b for a, b in pairwise(order)):
            raise ConfigurationError("repeats")
        if late_system and "system" in order[1:]:
            raise ConfigurationError("late system")
        return "|".join(f"{d['role']}:{d['content']}" for d in dicts)

    return render


U, A, S = (lambda text, role=role: ChatMessage(role, text) for role in ("user", "assistant", "system"))


@pytest.mark.parametrize(
    ("render", "messages", "text"),
    [
        (refusing(), [U("a"), U("b"), S("c")], "user:a|user:b|system:c"),
        (refusing(repeats=True), [U("a"), U("b"), A("c")], "user:a\n\nb|assistant:c"),
        (refusing(repeats=True), [U(""), U("b"), U("")], "user:b"),
        (refusing(late_system=True), [U("a"), S("b"), A("c"), S("d")], "system:b\n\nd|user:a|assistant:c"),
        (refusing(late_system=True, repeats=True), [U("a"), S("b"), U("c")], "system:b|user:a\n\nc"),
        (refusing(roles={"system"}), [S("a"), U("b"), A("c")], "user:a\n\nb|assistant:c"),
        (refusing(roles={"system"}), [S("a"), A("c")], "user:a|assistant:c"),
        (refusing(roles={"developer"}), [ChatMessage("developer", "a"), U("b")], "system:a|user:b"),
    ],
)
def test_least_change_the_template_accepts(render: Callable[..., str], messages: list[ChatMessage], text: str) -> None:
    turns, rendered = arrange(messages, render)
    assert rendered == text
    kept = [message.content for turn in turns for message in turn.messages]
    assert sorted(kept) == sorted(message.content for message in messages)


def test_first_refusal_is_reported() -> None:
    with pytest.raises(ConfigurationError, match="role"):
        arrange([S("a"), U("b")], refusing(roles={"user", "system"}))
    with pytest.raises(ConfigurationError, match="at least one message"):
        arrange([], refusing())


def test_tool_results_stay_apart() -> None:
    results = [ChatMessage("tool", "1", tool_call_id="a"), ChatMessage("tool", "2", tool_call_id="b")]
    calls = [ChatMessage("assistant", "x", tool_calls=(CALL,)), ChatMessage("assistant", "y", tool_calls=(CALL,))]
    turns, _ = arrange([U("q"), U("r"), *calls, *results], lambda d: refusing(repeats=True)(d[:2]) + refusing()(d[2:]))
    assert [len(t.messages) for t in turns] == [2, 2, 1, 1]
    assert len(turns[1].to_dict()["tool_calls"]) == 2


def test_offsets_of_merged_contents() -> None:
    turn = Turn((U(""), U("one"), U(""), U("two")), "user")
    assert turn.content == "one\n\ntwo"
    assert [turn.content[o : o + len(m.content)] for m, o in zip(turn.messages, turn.offsets, strict=True)] == [
        m.content for m in turn.messages
    ]


def test_dict_form() -> None:
    message = ChatMessage("assistant", "c", name="n", tool_calls=(CALL,), reasoning="r", segment_id="hidden")
    assert message.to_dict() == {
        "role": "assistant",
        "content": "c",
        "name": "n",
        "tool_calls": [CALL],
        "reasoning": "r",
        "reasoning_content": "r",
    }
    assert ChatMessage("tool", "c", tool_call_id="1").to_dict("d") == {
        "role": "tool",
        "content": "d",
        "tool_call_id": "1",
    }


@pytest.mark.parametrize(
    ("text", "span"), [("", (0, 0)), (" \n", (0, 0)), ("a", (0, 1)), (" a b ", (1, 4)), ("\u00a0x\u2003", (1, 2))]
)
def test_core_span(text: str, span: tuple[int, int]) -> None:
    assert core_span(text) == span


def test_core_leaves_out_thinking() -> None:
    message = ChatMessage("assistant", "<think>a</think>\n\nb ")
    assert message.content[slice(*message.core())] == "b"
    assert ChatMessage("user", "<think>a</think> b").core() == (0, 18)
    start, end = ChatMessage("assistant", "<think>a</think>\n").core()
    assert start == end


def test_names() -> None:
    assert shared_name(ChatMessage("user", "x"), "me") == "user_question"
    assert shared_name(ChatMessage("user", "x", name="User"), "me") == "user_question"
    assert shared_name(ChatMessage("user", "x", name="coder"), "me") == "agent:coder:response"
    assert shared_name(ChatMessage("assistant", "x"), "me") == "agent:me:response"
    assert shared_name(ChatMessage("assistant", "x", name="coder"), "me") == "agent:coder:response"
    assert shared_name(ChatMessage("tool", "x", name="search"), "me") == "tool:search:result"
    names = tool_names([ChatMessage("assistant", tool_calls=(CALL,))])
    assert shared_name(ChatMessage("tool", "x", tool_call_id="c1"), "me", names) == "tool:count_hens:result"
    assert shared_name(ChatMessage("tool", "x", tool_call_id="?"), "me", names) == "tool:tool:result"


def test_surrogates_are_cleaned() -> None:
    assert clean_text("a\ud83d b\U0001f600") == "a\ufffd b\U0001f600"
    plain = "plain"
    assert clean_text(plain) is plain
