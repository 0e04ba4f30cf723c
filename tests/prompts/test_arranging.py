"""Whatever a chat template does with messages it does not expect, the text of every message reaches the model."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.prompts.arranging import arrange
from kvcomm_integrations.prompts.chat_message import ChatMessage, shared_name, with_parsed_arguments

TEMPLATES = {
    # shows known roles and says nothing of others; tools and several system messages are fine
    "lenient": (
        "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'tool'] %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
        "{% endif %}{% endfor %}"
    ),
    # shows what users and assistants say, and one system message
    "no tools": (
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] or (m.role == 'system' and loop.first) %}"
        "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    ),
    # users and assistants must take turns; nothing else exists
    "strict": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    ),
    # tools are fine, all calls in one message, but after a result only the assistant may speak
    "turns with tools": (
        "{% set ns = namespace(last='') %}{% for m in messages %}"
        "{% if m.role == 'user' and ns.last in ['user', 'tool'] %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.last = m.role %}<{{ m.role }}>"
        "{% if m.tool_calls %}{% for c in m.tool_calls %}[{{ c.function.name }}]{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    # one call at a time; what is said beside a call is left out
    "single calls": (
        "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('only single tool-calls') }}{% endif %}[{{ m.tool_calls[0].function.name }} "
        "{{ m.tool_calls[0].function.arguments | tojson }}]{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
}


def call(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": f"tool{number}", "arguments": '{"n": 1}'}}


SYSTEM, USER = ChatMessage("system", "You are brief."), ChatMessage("user", "How many hens?")
CALLS = ChatMessage("assistant", "Let me look.", tool_calls=(call(1),))
RESULT = ChatMessage("tool", "There are 12 hens.", tool_call_id="c1")
CONVERSATIONS = {
    "developer": [ChatMessage("developer", "Be brief."), USER],
    "a late developer": [SYSTEM, USER, ChatMessage("assistant", "12."), ChatMessage("developer", "Be kind."), USER],
    "another role": [
        SYSTEM,
        USER,
        ChatMessage("critic", "That is wrong.", name="critic"),
        ChatMessage("user", "Go on."),
    ],
    "two systems": [SYSTEM, ChatMessage("system", "Be kind."), USER],
    "tools": [SYSTEM, USER, CALLS, RESULT],
    "tools, then the user": [SYSTEM, USER, CALLS, RESULT, ChatMessage("user", "And cows?")],
    "two calls": [
        USER,
        ChatMessage("assistant", "", tool_calls=(call(1), call(2))),
        RESULT,
        ChatMessage("tool", "There are 3 cows.", tool_call_id="c2"),
    ],
}


def renderer(name: str) -> Any:
    def refuse(text: str) -> str:
        raise jinja2.TemplateError(text)

    template = jinja2.Environment().from_string(TEMPLATES[name])

    def render(dicts: Any) -> str:
        try:
            return template.render(messages=[with_parsed_arguments(d) for d in dicts], raise_exception=refuse)
        except jinja2.TemplateError as error:
            raise ConfigurationError(str(error)) from error

    return render


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_text_and_every_call_stands_in_the_prompt(template: str, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    _, text = arrange(messages, renderer(template))
    for message in messages:
        assert message.content in text or message.tool_calls
        for one in message.tool_calls:
            assert one["function"]["name"] in text


def test_what_the_template_knows_is_left_as_it_is() -> None:
    for conversation in ("tools", "tools, then the user", "two systems"):
        turns, _ = arrange(CONVERSATIONS[conversation], renderer("lenient"))
        assert [turn.messages for turn in turns] == [(message,) for message in CONVERSATIONS[conversation]]


def test_a_developer_speaks_as_the_system_where_it_stands() -> None:
    _, text = arrange(CONVERSATIONS["a late developer"], renderer("lenient"))
    assert text == "<system>You are brief.<user>How many hens?<assistant>12.<system>Be kind.<user>How many hens?"


def test_calls_and_results_that_cannot_be_shown_are_text_in_one_form() -> None:
    _, text = arrange(CONVERSATIONS["tools, then the user"], renderer("no tools"))
    said = '<assistant>Let me look.\n<tool_call>\n{"name": "tool1", "arguments": {"n": 1}}\n</tool_call>'
    heard = "<user>Result of tool1:\n\nThere are 12 hens.\n\nAnd cows?"
    assert text == f"<system>You are brief.<user>How many hens?{said}{heard}"


def test_each_call_is_followed_by_its_result_where_only_one_is_allowed() -> None:
    _, text = arrange(CONVERSATIONS["two calls"], renderer("single calls"))
    order = [text.index(part) for part in ("tool1", "There are 12 hens.", "tool2", "There are 3 cows.")]
    assert order == sorted(order) and "<tool_call>" not in text


def test_ids_that_come_again_in_a_later_turn_keep_their_own_results() -> None:
    def turn(text: str) -> list[ChatMessage]:
        results = [ChatMessage("tool", f"{text} {n}", tool_call_id=f"c{n}") for n in (1, 2)]
        return [ChatMessage("assistant", "", tool_calls=(call(1), call(2))), *results]

    _, text = arrange([USER, *turn("early"), USER, *turn("late")], renderer("single calls"))
    order = [text.index(part) for part in ("early 1", "early 2", "late 1", "late 2")]
    assert order == sorted(order) and text.rindex("How many") < order[2]


def test_words_beside_a_call_do_not_cost_the_family_its_own_form_of_calls() -> None:
    _, text = arrange(CONVERSATIONS["tools"], renderer("single calls"))
    assert text == '<system>You are brief.<user>How many hens?<assistant>[tool1 {"n": 1}]<tool>There are 12 hens.'


def test_a_result_as_text_is_still_known_as_the_tools() -> None:
    turns, _ = arrange(CONVERSATIONS["tools"], renderer("no tools"))
    names = [shared_name(message, "solver") for message in turns[-1].messages]
    assert names == ["user_question", "tool:tool1:result"]


def test_a_template_that_drops_everything_is_refused_with_the_role() -> None:
    with pytest.raises(ConfigurationError, match="'critic'"):
        arrange([ChatMessage("critic", "Hm."), USER], lambda dicts: "nothing")
