"""vLLM's parsers behind the codec interface: calls and thinking of other families."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvcomm_integrations.chat.chunks import CallChunk, ReasoningChunk, TextChunk
from kvcomm_integrations.chat.detect import named_tool_format, tool_format_for, tool_format_of_template
from kvcomm_integrations.chat.hermes import HermesFormat
from kvcomm_integrations.chat.tool_format import ToolUse, tool_use
from kvcomm_integrations.chat.vllm_format import VllmFormat
from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.errors import ConfigurationError, UnsupportedModelError
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer

pytest.importorskip("vllm")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def tokenizer_of(template: str = "{{ messages }}", marks: Sequence[str] = MARKS) -> ChatTokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_end|>"), AddedToken("<|python_tag|>")])
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)
    return ChatTokenizer(hf, source="bytes")


TOKENIZER = tokenizer_of()
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}]


def read(codec: Any, text: str, use: ToolUse, size: int, prompt: str = "q") -> tuple[str, str, list[tuple[str, Any]]]:
    """Text, reasoning and calls of an answer that comes in deltas of ``size`` tokens."""
    ids = TOKENIZER.encode(prompt, allow_special=True)
    parser = codec.parser(TOKENIZER, use, SegmentedPrompt(tuple(ids), (), prompt), constrained=False)
    answer = TOKENIZER.encode(text, allow_special=True)
    pieces = []
    sent = ""
    for start in range(0, len(answer), size):
        part = answer[start : start + size]
        whole = TOKENIZER.decode(answer[: start + size], skip_special=False)
        pieces += parser.feed(whole[len(sent) :], part, last=start + size >= len(answer))
        sent = whole
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        if isinstance(piece, CallChunk):
            entry = calls.setdefault(piece.index, ["", ""])
            entry[0] += piece.name or ""
            entry[1] += piece.arguments
            assert (piece.id is None) == (piece.name is None)
    return (
        "".join(p.text for p in pieces if isinstance(p, TextChunk)),
        "".join(p.text for p in pieces if isinstance(p, ReasoningChunk)),
        [(name, json.loads(arguments or "{}")) for name, arguments in calls.values()],
    )


CASES = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Paris"}}',
    "pythonic": '[weather(city="Paris")]',
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    ),
}


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("name", sorted(CASES))
def test_calls_are_read_as_they_stream(name, size):
    text, _, calls = read(named_tool_format(name, None), CASES[name], tool_use(TOOLS), size)
    assert calls == [("weather", {"city": "Paris"})]
    assert text.strip() == ""


@pytest.mark.parametrize("name", sorted(CASES))
def test_text_without_calls_stays_text(name):
    assert read(named_tool_format(name, None), "It is sunny.", tool_use(TOOLS), 3) == ("It is sunny.", "", [])


@pytest.mark.parametrize("size", [1, 5])
def test_thinking_is_read(size):
    codec = named_tool_format("hermes", "deepseek_r1")
    text, reasoning, calls = read(codec, "let me see</think>" + CASES["hermes"], tool_use(TOOLS), size, "q<think>")
    assert (text.strip(), reasoning, calls) == ("", "let me see", [("weather", {"city": "Paris"})])
    assert read(codec, "let me see</think>Sunny.", ToolUse(), size)[:2] == ("Sunny.", "let me see")


PROMPT = SegmentedPrompt((1,), (), "question")
MISTRAL = tokenizer_of(marks=["[TOOL_CALLS]", "[ARGS]"])


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000])
@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}',
        '[TOOL_CALLS]weather{"city": "Paris"}',
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]',
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]',
    ],
)
def test_all_forms_of_mistrals_calls_are_read(monkeypatch, text, size):
    monkeypatch.setitem(globals(), "TOKENIZER", MISTRAL)
    codec = named_tool_format("mistral", None)
    assert read(codec, text, tool_use(TOOLS), size) == ("", "", [("weather", {"city": "Paris"})])
    assert read(codec, "It is sunny.", tool_use(TOOLS), size) == ("It is sunny.", "", [])


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_list_of_calls_that_is_cut_off_ends_with_one_that_is_not_run(monkeypatch, size):
    monkeypatch.setitem(globals(), "TOKENIZER", MISTRAL)
    whole = (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "weather", "arguments": {"city": "P'
    )
    ids = MISTRAL.encode(whole, allow_special=True)
    parser = named_tool_format("mistral", None).parser(MISTRAL, tool_use(TOOLS), PROMPT, constrained=False)
    pieces, sent = [], ""
    for start in range(0, len(ids), size):
        text = MISTRAL.decode(ids[: start + size], skip_special=False)
        pieces += parser.feed(text[len(sent) :], ids[start : start + size], last=start + size >= len(ids))
        sent = text
    assert [(piece.name, piece.arguments) for piece in pieces] == [
        ("weather", '{"city": "Rome"}'),
        ("weather", '{"city": "P'),
    ]
    assert [parser.closed(index) for index in (0, 1)] == [True, False]


FORCED = {
    "hermes": CASES["hermes"],
    "llama3_json": CASES["llama3_json"],
    "glm45": "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n</tool_call>",
    "minimax_m2": '\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter></invoke>\n'
    "</minimax:tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
}
"""A call as each family's constraint wants it, space by space."""


@pytest.mark.parametrize("name", FORCED)
def test_with_tools_and_a_schema_the_model_gives_either(name):
    xgrammar = pytest.importorskip("xgrammar")
    codec = named_tool_format(name, None)
    asked = SamplingOptions(structured_output={"json": {**SCHEMA, "properties": {"city": {"type": "string"}}}})
    constraint = codec.adjust(TOKENIZER, tool_use(TOOLS), asked, PROMPT).structured_output
    letters = [chr(0), "\n", *map(chr, range(32, 127))]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(letters, stop_token_ids=[0]), max_threads=1)
    grammar = compiler.compile_structural_tag(constraint["structural_tag"])
    for text, accepted in ((FORCED[name], True), ('{"city": "x"}', True), ("It is sunny.", False), ("{}", False)):
        matcher = xgrammar.GrammarMatcher(grammar)
        assert (matcher.accept_string(text) and matcher.accept_token(0)) is accepted, text
    assert codec.calls_beside_answer


@pytest.mark.parametrize("name", ["seed_oss", "phi4_mini_json", "granite", "internlm"])
def test_where_that_cannot_be_said_it_is_refused_before_anything_runs(name):
    asked = SamplingOptions(structured_output={"json": SCHEMA})
    codec = named_tool_format(name, None)
    assert not codec.calls_beside_answer
    with pytest.raises(ConfigurationError, match=f"{name}.*function_calling"):
        codec.adjust(TOKENIZER, tool_use(TOOLS), asked, PROMPT)


QWEN35 = "{{ '<function=' }}{{ '<parameter=' }}{{ '<think>' }}"
CODER_CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_thinking_of_templates_that_open_it_stays_out_of_the_content(size):
    """Qwen3.5 and its like: calls of another form than Hermes', and thinking that the prompt has begun."""
    codec = tool_format_of_template(QWEN35, "x")
    prompt = "q<think>\n"
    text, reasoning, calls = read(codec, f"let me see\n</think>\n\n{CODER_CALL}", tool_use(TOOLS), size, prompt)
    assert (text.strip(), reasoning.strip(), calls) == ("", "let me see", [("weather", {"city": "Paris"})])
    for use in (ToolUse(), tool_use(TOOLS)):
        text, reasoning, calls = read(codec, "let me see\n</think>\n\nSunny.", use, size, prompt)
        assert (text.strip(), reasoning.strip(), calls) == ("Sunny.", "let me see", [])


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000])
@pytest.mark.parametrize("answer", ['{"name": "Bob", "age": 3}', '{"name": "Bob", "parameters": {"age": 3}}'])
def test_an_answer_that_is_json_is_no_call_of_a_tool_that_nobody_bound(size, answer):
    codec = named_tool_format("llama3_json", None)
    assert read(codec, answer, tool_use(TOOLS), size) == (answer, "", [])


def test_a_forced_call_is_constrained():
    codec = named_tool_format("hermes", None)
    sampling = codec.adjust(TOKENIZER, tool_use(TOOLS, "required"), SamplingOptions(seed=1), PROMPT)
    assert sampling.seed == 1
    assert "weather" in json.dumps(sampling.structured_output) and "city" in json.dumps(sampling.structured_output)
    assert codec.adjust(TOKENIZER, tool_use(TOOLS), SamplingOptions(), PROMPT).structured_output is None
    asked = SamplingOptions(structured_output={"json": SCHEMA})
    with pytest.raises(ConfigurationError, match="cannot be combined"):
        codec.adjust(TOKENIZER, tool_use(TOOLS, "required"), asked, PROMPT)


def test_our_structural_tags_are_what_vllm_takes():
    from vllm.parser.abstract_parser import structured_outputs_to_format
    from vllm.sampling_params import StructuredOutputsParams

    codec = HermesFormat()
    for use, answer in (
        (tool_use(TOOLS, "required"), None),
        (tool_use(TOOLS, strict=True), None),
        (tool_use(TOOLS), {"json": SCHEMA}),
        (tool_use(TOOLS), {"json_object": True}),
        (tool_use(TOOLS), {"choice": ["a", "b"]}),
        (tool_use(TOOLS), {"regex": "a+"}),
    ):
        assert structured_outputs_to_format(StructuredOutputsParams(**codec.constraint(use, answer))) is not None


def test_our_structural_tags_compile():
    xgrammar = pytest.importorskip("xgrammar")
    codec = HermesFormat()
    info = xgrammar.TokenizerInfo([chr(i) for i in range(32, 127)], stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    call = CASES["hermes"]
    for use, answer, good, bad in (
        (tool_use(TOOLS, "required"), None, [call, f"{call}\n{call}"], ["hi", call.replace("city", "town")]),
        (tool_use(TOOLS, "required", parallel=False), None, [call], [f"{call}\n{call}"]),
        (tool_use(TOOLS, strict=True), None, [call, f"hi {call}"], [call.replace("city", "town")]),
        (tool_use(TOOLS), {"json": SCHEMA}, [call, '{"city": "x"}'], ["hi"]),
    ):
        grammar = compiler.compile_structural_tag(codec.constraint(use, answer)["structural_tag"])
        for text in good:
            matcher = xgrammar.GrammarMatcher(grammar)
            assert matcher.accept_string(text) and matcher.accept_token(0), text
        for text in bad:
            matcher = xgrammar.GrammarMatcher(grammar)
            assert not (matcher.accept_string(text) and matcher.accept_token(0)), text


ANSWER = '{"city": "x"}'


@pytest.mark.parametrize("codec", [HermesFormat(), named_tool_format("hermes", "deepseek_r1")], ids=["hermes", "vllm"])
@pytest.mark.parametrize(
    ("prompt", "good", "bad"),
    [
        ("q", [ANSWER, f"<think>Hm {{}}.</think>\n\n{ANSWER}"], ["hm", "<think>hm</think>no json"]),
        ("q<think>\n", [f"Hm {{}}.\n</think>\n\n{ANSWER}"], [ANSWER, "hm"]),
        ("q<think>\n\n</think>\n\n", [ANSWER], [f"<think>hm</think>{ANSWER}"]),
    ],
    ids=["may think", "thinks", "told not to think"],
)
def test_a_constraint_begins_after_the_thinking(codec, prompt, good, bad):
    xgrammar = pytest.importorskip("xgrammar")
    thinker = tokenizer_of("{{ messages[0].content }}{% if x %}<think></think>{% endif %}")
    asked = SamplingOptions(structured_output={"json": SCHEMA})
    constraint = codec.adjust(thinker, ToolUse(), asked, SegmentedPrompt((1,), (), prompt)).structured_output
    letters = [chr(0), "\n", *map(chr, range(32, 127))]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(letters, stop_token_ids=[0]), max_threads=1)
    if "json" in constraint:
        grammar = compiler.compile_json_schema(json.dumps(constraint["json"]))
    else:
        grammar = compiler.compile_structural_tag(constraint["structural_tag"])
    for texts, accepted in ((good, True), (bad, False)):
        for text in texts:
            matcher = xgrammar.GrammarMatcher(grammar)
            assert (matcher.accept_string(text) and matcher.accept_token(0)) is accepted, text


def test_a_model_that_does_not_think_is_constrained_from_the_first_token():
    asked = SamplingOptions(structured_output={"json": SCHEMA})
    assert HermesFormat().adjust(TOKENIZER, ToolUse(), asked, PROMPT) == asked


def test_unknown_parsers_are_refused():
    with pytest.raises(ConfigurationError, match="no-such"):
        read(named_tool_format("no-such", None), "x", tool_use(TOOLS), 1)


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("{{ '<arg_key>' }}{{ '<arg_value>' }}", "glm45"),
        ("{{ '<function=' }}{{ '<parameter=' }}", "qwen3_coder"),
    ],
)
def test_the_family_is_told_by_the_template(template, parser):
    codec = tool_format_for(tokenizer_of(template))
    assert isinstance(codec, VllmFormat) and codec.tool_parser == parser


def test_most_models_speak_hermes_and_harmony_is_refused():
    assert isinstance(tool_format_for(TOKENIZER), HermesFormat)
    with pytest.raises(UnsupportedModelError, match="Harmony"):
        tool_format_for(tokenizer_of("<|channel|><|message|>"))
