"""Rendering equals the template's own on every template and conversation, whatever stands in the messages."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvcomm_integrations.config import Tokenization
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.prompts import ChatMessage, ChatTokenizer, ContentRegistry, PromptBuilder
from kvcomm_integrations.prompts.arranging import arrange
from kvcomm_integrations.prompts.chat_message import clean_text

from .checks import check_cover, check_labels, check_text, control_count
from .conftest import reading
from .conversations import ANSWER, CODE, CONVERSATIONS, QUESTION, RESULT, TOOLS
from .templates import HOSTILE, TEMPLATES, Template

BUILDS = [(t.name, c) for t in TEMPLATES for c in CONVERSATIONS]


def test_enough_families_and_conversations() -> None:
    assert len({t.name for t in TEMPLATES}) == len(TEMPLATES) >= 20
    assert len(CONVERSATIONS) >= 10


def expected(tokenizer: ChatTokenizer, messages: list[ChatMessage], tools: list | None) -> str | None:
    """What ``apply_chat_template`` itself says; ``None`` if it refuses."""
    dicts = [replace(m, content=clean_text(m.content)).to_dict() for m in messages]
    for d in dicts:
        for call in d.get("tool_calls", ()):
            call["function"] = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
    try:
        return tokenizer.hf.apply_chat_template(dicts, tools=tools, tokenize=False, add_generation_prompt=True)
    except Exception:  # noqa: BLE001  (templates raise what they like)
        return None


@pytest.mark.parametrize("tokenization", list(Tokenization))
@pytest.mark.parametrize(("template", "conversation"), BUILDS)
def test_prompt_is_what_the_template_says(
    template: str, conversation: str, tokenization: Tokenization, template_tokenizers: dict[str, ChatTokenizer]
) -> None:
    tokenizer = template_tokenizers[template]
    messages = CONVERSATIONS[conversation]
    tools = TOOLS if conversation == "tools" else None
    builder = PromptBuilder(tokenizer, ContentRegistry(), tokenization=tokenization)
    want = expected(tokenizer, messages, tools)
    try:
        built = builder.build(messages, session="s", agent="a", tools=tools)
    except ConfigurationError:
        assert want is None
        return
    if want is not None and built.prompt.text != want:  # only where the template left something out
        texts = [clean_text(m.content)[slice(*m.core())] for m in messages]
        assert not all(text in want for text in texts)
        assert all(text in built.prompt.text for text in texts)
    check_cover(built)
    check_text(built, tokenizer)
    if tokenization is Tokenization.SEGMENTED:
        check_labels(built, tokenizer)
    again = builder.build(messages, session="s", agent="b", tools=tools)
    assert again.prompt.token_ids == built.prompt.token_ids


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
def test_plain_contents_are_found_in_every_template(
    template: Template, template_tokenizers: dict[str, ChatTokenizer]
) -> None:
    built = PromptBuilder(template_tokenizers[template.name], ContentRegistry()).build(
        CONVERSATIONS["chat"], session="s", agent="a"
    )
    assert [s.name for s in built.placeholders] == ["user_question", "agent:a:response"]
    assert [c.text for c in built.contents] == [QUESTION, ANSWER]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
def test_control_tokens_come_from_the_template_only(
    template: Template, template_tokenizers: dict[str, ChatTokenizer]
) -> None:
    tokenizer = template_tokenizers[template.name]
    harmful = CONVERSATIONS["injection"]
    harmless = [replace(m, content=tokenizer.codec.control_pattern.sub("nothing", m.content)) for m in harmful]
    for tokenization in Tokenization:
        counts = [
            control_count(
                PromptBuilder(tokenizer, ContentRegistry(), tokenization=tokenization).build(
                    messages, session="s", agent="a"
                ),
                tokenizer,
            )
            for messages in (harmful, harmless)
        ]
        assert counts[0] == counts[1]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_template_costs_placeholders_never_the_prompt(
    hostile: str, conversation: str, tokenizer: ChatTokenizer
) -> None:
    other = reading(tokenizer, HOSTILE[hostile])
    messages = CONVERSATIONS[conversation]
    want = expected(other, messages, None)
    builder = PromptBuilder(other, ContentRegistry())
    try:
        built = builder.build(messages, session="s", agent="a")
    except ConfigurationError:
        assert want is None or hostile == "drops users"
        return
    if conversation != "injection":  # there the data's control tokens are hidden from the template on purpose
        assert built.prompt.text == want
    check_cover(built)
    check_text(built, other)
    check_labels(built, other)


def test_hostile_templates_do_cost_placeholders(tokenizer: ChatTokenizer) -> None:
    found = {}
    for name, text in HOSTILE.items():
        if name == "drops users":  # refused
            continue
        other = reading(tokenizer, text)
        built = PromptBuilder(other, ContentRegistry()).build(
            [ChatMessage("user", QUESTION), ChatMessage("assistant", CODE), ChatMessage("user", RESULT)],
            session="s",
            agent="a",
        )
        found[name] = [s.name for s in built.placeholders]
    user, other, last = "user_question", "agent:a:response", "user_question#2"
    assert found == {
        "upper": [],
        "truncates": [],
        "counts": [],
        "reverses": [],
        "twice": [user, last, other, f"{other}#2", f"{user}#3", f"{user}#4"],
        "tests": [other, user],  # the first question is not located, so the last message is the first of its name
        "refuses digits": [],
        "words": [user, last],
        "json": [user],
        "swaps": [],
    }


def test_template_kwargs_reach_the_template(template_tokenizers: dict[str, ChatTokenizer]) -> None:
    builder = PromptBuilder(template_tokenizers["qwen3"], ContentRegistry())
    kwargs = {"enable_thinking": False}
    built = builder.build([ChatMessage("user", QUESTION)], session="s", agent="a", template_kwargs=kwargs)
    assert built.prompt.text.endswith("<think>\n\n</think>\n\n")
    open_ended = builder.build(
        [ChatMessage("user", QUESTION), ChatMessage("assistant", ANSWER)],
        session="s",
        agent="a",
        template_kwargs={"continue_final_message": True},
    )
    assert open_ended.prompt.text.endswith(ANSWER)


def test_thinking_is_left_out_of_the_content(template_tokenizers: dict[str, ChatTokenizer]) -> None:
    builder = PromptBuilder(template_tokenizers["qwen3"], ContentRegistry())
    built = builder.build(CONVERSATIONS["thinking"], session="s", agent="a")
    assert "Hens. Fence." not in built.prompt.text
    assert ANSWER in [c.text for c in built.contents]


def test_refusal_carries_the_templates_words(template_tokenizers: dict[str, ChatTokenizer]) -> None:
    builder = PromptBuilder(template_tokenizers["llama2"], ContentRegistry())
    with pytest.raises(ConfigurationError, match="alternate"):
        builder.build([ChatMessage("assistant", RESULT), ChatMessage("user", RESULT)], session="s", agent="a")


@pytest.mark.parametrize("name", ["gemma", "mistral", "llama2"])
def test_strict_templates_get_merged_messages(name: str, template_tokenizers: dict[str, ChatTokenizer]) -> None:
    tokenizer = template_tokenizers[name]
    builder = PromptBuilder(tokenizer, ContentRegistry())
    built = builder.build(CONVERSATIONS["agents"], session="s", agent="critic")
    assert {"user_question", "agent:solver:response", "agent:coder:response"} <= {c.name for c in built.contents}
    assert "You are the critic." in built.prompt.text
    check_text(built, tokenizer)


@pytest.mark.parametrize("name", ["gemma3", "command-r", "mistral with tools"])
def test_strict_templates_keep_the_system_prompt_first(
    name: str, template_tokenizers: dict[str, ChatTokenizer]
) -> None:
    builder = PromptBuilder(template_tokenizers[name], ContentRegistry())
    text = builder.build(CONVERSATIONS["agents"], session="s", agent="critic").prompt.text
    assert text.count("You are the critic.") == 1
    assert text.index("You are the critic.") < text.index("Question: ")


def test_a_changed_content_is_not_taken_for_the_original(template_tokenizers: dict[str, ChatTokenizer]) -> None:
    """Falcon's format removes blank lines: such a content is located nowhere, and a plain one is."""
    builder = PromptBuilder(template_tokenizers["falcon"], ContentRegistry())
    built = builder.build([ChatMessage("user", f"{QUESTION}\n\n{ANSWER}")], session="s", agent="a")
    assert f"{QUESTION}\n{ANSWER}" in built.prompt.text
    assert not built.placeholders


@pytest.mark.parametrize("name", ["granite", "deepseek-r1", "qwen3"])
def test_tool_results_are_found_where_the_template_leaves_them_alone(
    name: str, template_tokenizers: dict[str, ChatTokenizer]
) -> None:
    builder = PromptBuilder(template_tokenizers[name], ContentRegistry())
    built = builder.build(CONVERSATIONS["tools"], session="s", agent="a", tools=TOOLS)
    assert "tool:count_hens:result" in [c.name for c in built.contents]
    assert "count_hens" in built.prompt.text


def test_lenient_template_gets_messages_untouched(tokenizer: ChatTokenizer) -> None:
    messages = CONVERSATIONS["users in a row"]
    turns, _ = arrange(messages, tokenizer.render)
    assert [turn.messages for turn in turns] == [(m,) for m in messages]
