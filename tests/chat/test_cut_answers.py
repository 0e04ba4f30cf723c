"""A call that the answer's end has cut off is reported as invalid by the runtime, whatever format it is in."""

from __future__ import annotations

import json

import pytest
from test_vllm_parsers import CASES, MARKS, tokenizer_of

from kvcomm_integrations.chat.chunks import CallChunk, FinalChunk, InvalidCallChunk, TextChunk
from kvcomm_integrations.chat.detect import named_tool_format
from kvcomm_integrations.chat.hermes import HermesFormat
from kvcomm_integrations.chat.runtime import ChatRuntime
from kvcomm_integrations.chat.vllm_format import _holds
from kvcomm_integrations.engines.fake import FakeEngine
from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.prompts.chat_message import ChatMessage

TOKENIZER = tokenizer_of("{{ messages[0].content }}", (*MARKS, "[TOOL_CALLS]", "[ARGS]"))
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}]
ALL = {**CASES, "ours": CASES["hermes"], "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}'}


def codec(name):
    return HermesFormat() if name == "ours" else named_tool_format(name, None)


def answer(name, text, limit=None, *, size=2, stop=(), **options):
    """Text, whole calls, invalid calls and the last piece of an answer that is cut after ``limit`` characters."""
    max_tokens = None if limit is None else len(TOKENIZER.encode(text[:limit], allow_special=True))
    engine = FakeEngine(TOKENIZER, text, delta_tokens=size)
    runtime = ChatRuntime(engine, tool_format=codec(name))
    sampling = SamplingOptions(max_tokens=max_tokens, stop=stop)
    pieces = list(
        runtime.stream_sync(runtime.prepare([ChatMessage("user", "q")], tools=TOOLS, sampling=sampling, **options))
    )
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        if isinstance(piece, CallChunk):
            entry = calls.setdefault(piece.index, ["", ""])
            entry[0] += piece.name or ""
            entry[1] += piece.arguments
    invalid = [piece for piece in pieces if isinstance(piece, InvalidCallChunk)]
    last = pieces[-1]
    assert isinstance(last, FinalChunk) and last.invalid_calls == tuple(invalid)
    for piece in invalid:
        del calls[piece.index]
    whole = [(called, json.loads(arguments or "{}")) for called, arguments in calls.values()]
    return "".join(piece.text for piece in pieces if isinstance(piece, TextChunk)), whole, invalid, last


def cuts():
    for name, text in sorted(ALL.items()):
        city = text.find("Paris")
        for limit in (text.find("weather") + 4, text.find("weather") + 7, city, city + 3, city + 5, city + 6):
            yield pytest.param(name, text, limit, id=f"{name}-{text[:limit][-8:]!r}")


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(("name", "text", "limit"), list(cuts()))
def test_a_call_cut_off_by_the_limit_is_no_call(name, text, limit, size):
    said, whole, invalid, last = answer(name, text, limit, size=size)
    assert whole == []
    assert last.finish_reason == "length"
    assert said or invalid, "nothing of the call is to be seen"
    for piece in invalid:
        assert piece.cut
        assert "'length'" in piece.error and "raise max_tokens=" in piece.error
        if "Par" in text[:limit]:
            assert "Par" in piece.written


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("name", sorted(ALL))
def test_a_call_that_ends_at_the_limit_is_a_call_where_that_can_be_told(name, size):
    text = ALL[name]
    said, whole, invalid, last = answer(name, text, len(text), size=size)
    assert last.finish_reason == "length" and not said.strip()
    if name == "pythonic":
        assert whole == [] and len(invalid) == 1
    else:
        assert whole == [("weather", {"city": "Paris"})] and invalid == []


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", ["ours", "hermes", "llama3_json", "glm45", "qwen3_coder", "mistral"])
def test_only_the_last_call_is_cut(name, size):
    one = ALL[name]
    text = one + ("; " if name == "llama3_json" else "\n") + one.replace("Paris", "Rome")
    said, whole, invalid, _ = answer(name, text, text.find("Rome") + 2, size=size)
    if whole:
        assert whole == [("weather", {"city": "Paris"})]
        assert "Ro" in (invalid[0].written if invalid else said)
    else:
        assert size == 1000 and "Ro" in said


@pytest.mark.parametrize("name", sorted(ALL))
def test_an_answer_that_ends_by_itself_keeps_its_calls(name):
    _, whole, invalid, last = answer(name, ALL[name])
    assert whole == [("weather", {"city": "Paris"})] and invalid == []
    assert last.finish_reason == "tool_calls"


def test_the_same_arguments_in_an_earlier_call_prove_nothing():
    one = '{"name": "weather", "parameters": {"city": "Paris"}}'
    text = f"{one}; {one}"
    for cut in (2, 1):
        _, whole, _, _ = answer("llama3_json", text, len(text) - cut, size=1)
        assert whole == [("weather", {"city": "Paris"})]
    assert len(answer("llama3_json", text, len(text), size=1)[1]) == 2


def test_a_closing_tag_inside_the_arguments_closes_nothing():
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "</tool_call> and Paris"}}\n</tool_call>'
    _, whole, invalid, _ = answer("ours", text, text.find("Paris"))
    assert whole == [] and invalid[0].cut


def test_required_fields_are_checked_where_the_answer_was_cut_off():
    text = '<tool_call>\n{"name": "weather", "arguments": {"days": 2}}\n</tool_call>'
    _, whole, invalid, _ = answer("ours", text, len(text))
    assert whole == [] and "(city)" in invalid[0].error
    assert answer("ours", text)[1] == [("weather", {"days": 2})], "else it is the tool that says what is missing"


@pytest.mark.parametrize("name", ["ours", "llama3_json"])
def test_a_stop_string_inside_a_call_cuts_it_off_too(name):
    text = ALL[name]
    _, whole, invalid, last = answer(name, text, stop=("ris",), size=1)
    assert whole == [] and invalid[0].cut and last.finish_reason == "stop"
    assert "stop string 'ris'" in invalid[0].error


def test_a_stop_string_in_place_of_the_closing_tag_is_fine():
    _, whole, invalid, _ = answer("ours", ALL["hermes"], stop=("</tool_call>",))
    assert whole == [("weather", {"city": "Paris"})] and invalid == []


def test_arguments_that_are_no_json_object_are_invalid_and_not_cut():
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par</tool_call>'
    _, whole, invalid, last = answer("ours", text)
    assert whole == [] and not invalid[0].cut and invalid[0].written.startswith('{"city": "Par')
    assert last.finish_reason == "tool_calls"


@pytest.mark.parametrize("name", ["ours", "llama3_json"])
def test_a_second_call_that_nobody_asked_for_does_not_spoil_the_first(name):
    text = ALL[name] + ("; " if name == "llama3_json" else "\n") + ALL[name].replace("Paris", "Rome")
    _, whole, invalid, _ = answer(name, text, text.find("Rome") + 2, size=1, parallel_tool_calls=False)
    assert whole == [("weather", {"city": "Paris"})] and invalid == []


def test_braces_that_are_not_json_do_not_make_a_call_invalid():
    _, whole, invalid, _ = answer("pythonic", "[weather(city={'a': 'Paris'})]")
    assert whole == [("weather", {"city": {"a": "Paris"}})] and invalid == []
    text = ALL["llama3_json"]
    assert _holds("With {city} and {: " + text, '{"city": "Paris"}') is None
    assert _holds(text, '{"city": "Paris"}') is True
    assert _holds(text[:-5], '{"city": "Par"}') is False


def test_an_answer_that_is_all_thinking_is_not_repeated_as_text():
    codec = named_tool_format("hermes", "deepseek_r1")
    runtime = ChatRuntime(FakeEngine(TOKENIZER, "let me see, what"), tool_format=codec)
    pieces = list(runtime.stream_sync(runtime.prepare([ChatMessage("user", "q<think>")], tools=TOOLS)))
    assert not [piece for piece in pieces if isinstance(piece, TextChunk)]


def test_a_call_cut_off_in_its_name_is_text_after_the_thinking():
    codec = named_tool_format("glm45", "glm45")
    runtime = ChatRuntime(FakeEngine(TOKENIZER, "<think>hm</think><tool_call>weat"), tool_format=codec)
    sampling = SamplingOptions(max_tokens=len(TOKENIZER.encode("<think>hm</think><tool_call>wea", allow_special=True)))
    pieces = list(runtime.stream_sync(runtime.prepare([ChatMessage("user", "q")], tools=TOOLS, sampling=sampling)))
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextChunk))
    assert text.strip() == "<tool_call>wea"
