"""The Hermes parser: however the text is cut, the same pieces come out."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_integrations.chat.chunks import CallChunk, ReasoningChunk, TextChunk
from kvcomm_integrations.chat.hermes import HermesParser


def read(parser, parts):
    """Text, reasoning and (name, arguments text) of each call."""
    pieces = []
    for i, part in enumerate(parts):
        pieces += parser.feed(part, last=i == len(parts) - 1)
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        if isinstance(piece, CallChunk):
            entry = calls.setdefault(piece.index, ["", ""])
            entry[0] += piece.name or ""
            entry[1] += piece.arguments
    assert not any(isinstance(p, (TextChunk, ReasoningChunk)) and not p.text for p in pieces)
    text = "".join(p.text for p in pieces if isinstance(p, TextChunk))
    return text, "".join(p.text for p in pieces if isinstance(p, ReasoningChunk)), [tuple(c) for c in calls.values()]


def call(name, arguments):
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'


A, B = call("f", {"a": 1}), call("g", {"b": ["}", {"c": '"</x>'}]})
ARGS_A, ARGS_B = json.dumps({"a": 1}), json.dumps({"b": ["}", {"c": '"</x>'}]})

CASES = [
    ("plain text\n", {}, ("plain text\n", "", [])),
    ("  leading and trailing  ", {}, ("  leading and trailing  ", "", [])),
    (A, {}, ("", "", [("f", ARGS_A)])),
    (f"Look:\n{A}\n{B}\n", {}, ("Look:", "", [("f", ARGS_A), ("g", ARGS_B)])),
    (f"{A}\nand then\n{B}", {}, ("and then", "", [("f", ARGS_A), ("g", ARGS_B)])),
    (f"{A}\n{B}", {"parallel": False}, ("", "", [("f", ARGS_A)])),
    ("a < b <tool> c", {}, ("a < b <tool> c", "", [])),
    ("ends with <tool_ca", {}, ("ends with <tool_ca", "", [])),
    ("<tool_call>nonsense</tool_call>", {}, ("", "", [("", "nonsense")])),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', {}, ("", "", [("f", ARGS_A)])),
    ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', {}, ("", "", [("f", ARGS_A)])),
    ('<tool_call>{"name": "f"}</tool_call>', {}, ("", "", [("f", "{}")])),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}', {}, ("", "", [("f", ARGS_A)])),
    ('<tool_call>{"name": "f", "arguments": {"a": ', {}, ("", "", [("f", '{"a": ')])),
    ('<tool_call>{"name": "f", "arguments": {"a": </tool_call>x', {}, ("x", "", [("f", '{"a": ')])),
    (A, {"calls": False}, (A, "", [])),
    ("<think>\nhmm <b> 2\n</think>\n\nyes", {}, ("yes", "hmm <b> 2", [])),
    ("<think>\n\n</think>\n\nyes", {}, ("yes", "", [])),
    ("hmm\n</think>\nyes", {"thinking": True}, ("yes", "hmm", [])),
    ("hmm, no end", {"thinking": True}, ("", "hmm, no end", [])),
    ("<think>hmm</think>" + A, {}, ("", "hmm", [("f", ARGS_A)])),
    (A, {"thinking": True}, ("", "", [("f", ARGS_A)])),
    ('{"a": 1}', {"thinking": True, "constrained": True}, ('{"a": 1}', "", [])),
    ('hmm</think>{"a": 1}', {"thinking": True, "constrained": True}, ('{"a": 1}', "hmm", [])),
    ("the <think> tag", {}, ("the <think> tag", "", [])),
    ("", {}, ("", "", [])),
]


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
@pytest.mark.parametrize(("text", "options", "expected"), CASES)
def test_pieces(text, options, expected, size):
    parts = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    assert read(HermesParser(**options), parts) == expected
    assert read(HermesParser(**options), [*parts, ""]) == expected


@settings(max_examples=200, deadline=None)
@given(st.text('ab <>/{}"\\\n:tool_callthink,', max_size=80), st.integers(1, 9), st.booleans())
def test_any_text_in_any_cut_loses_nothing(text, size, thinking):
    parts = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    cut = read(HermesParser(thinking=thinking), parts)
    assert cut == read(HermesParser(thinking=thinking), [text])
    if "<tool_call>" not in text and not thinking and not text.lstrip().startswith("<think>"):
        assert cut == (text, "", [])


def test_text_comes_out_at_once():
    parser = HermesParser()
    assert parser.feed("one two") == [TextChunk("one two")]
    assert parser.feed(" three<") == [TextChunk(" three")]
    assert parser.feed("b>") == [TextChunk("<b>")]


def test_name_comes_before_the_arguments_are_whole():
    parser = HermesParser()
    (piece,) = parser.feed('<tool_call>\n{"name": "f", "arguments": {')[:1]
    assert isinstance(piece, CallChunk) and piece.name == "f" and piece.id
