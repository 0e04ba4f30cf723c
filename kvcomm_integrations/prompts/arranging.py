"""Arranges messages so that a chat template takes them and shows the text of every one of them.

Templates refuse what they do not know, or leave it out without a word: other roles than theirs, a second system
message, the result of a tool. What a template leaves out is found by rendering the same turns with other texts in them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.prompts.chat_message import SYSTEM_ROLES, ChatMessage, Turn, tool_names

Render = Callable[[Sequence[dict[str, Any]]], str]
Messages = Sequence[ChatMessage]

_ROLES = SYSTEM_ROLES | {"user", "assistant", "tool"}


def arrange(messages: Messages, render: Render) -> tuple[tuple[Turn, ...], str]:
    """The least change to ``messages`` that the template accepts and shows as a whole, and the text it renders.

    Tried in turn: as they are; runs of one role merged; system messages moved to the front and merged; the system
    message put before the first user message. Each of these also with other roles made ``system`` (``developer``) or
    ``user``, and with every call of a tool in a message of its own, followed by its result. Then, with these, calls as
    text of the assistant (``<tool_call>`` and JSON) and results as messages of the user, after "Result of <tool>:".

    Words of the assistant beside a call may be left out: many templates do that, and all else is as they want it.

    Args:
        messages: the conversation.
        render: the template; raises ``ConfigurationError`` where it refuses.

    Raises:
        ConfigurationError: the template refuses or shortens all of them, or there are no messages.
    """
    if not messages:
        raise ConfigurationError("a prompt needs at least one message, got none")
    refused: ConfigurationError | None = None
    dropped, nearly = "", None
    tried: list[tuple[Turn, ...]] = []
    for turns, own in _arrangements(messages):
        if nearly is not None and not own:
            return nearly
        if turns in tried:
            continue
        tried.append(turns)
        try:
            text = render([turn.to_dict() for turn in turns])
        except ConfigurationError as err:
            refused = refused or err
            continue
        lost = _lost(turns, render)
        if not lost:
            return turns, text
        if nearly is None and all(turn.to_dict().get("tool_calls") for turn in lost):
            nearly = turns, text
        dropped = dropped or lost[0].messages[0].role
    if nearly is not None:
        return nearly
    if dropped:
        raise ConfigurationError(
            f"the model's chat template leaves out the text of messages with the role {dropped!r}, however they are "
            "arranged; use another role, or another chat template"
        )
    assert refused is not None
    raise refused


def _arrangements(messages: Messages) -> Iterator[tuple[tuple[Turn, ...], bool]]:
    """Turns, and whether calls and results keep their own form in them."""
    known = [_with_known_role(message) for message in messages]
    for arrangement in (_as_is, _merged, _system_first, _system_in_user):
        for shape in (messages, known, _calls_apart(known)):
            yield arrangement(shape), True
    for arrangement in (_merged, _system_first, _system_in_user):
        yield arrangement(_as_text(known)), False


def _lost(turns: Sequence[Turn], render: Render) -> list[Turn]:
    """Turns whose text makes no difference to what the template renders."""
    dicts = [turn.to_dict() for turn in turns]
    said = [place for place, turn in enumerate(turns) if turn.content.strip()]
    marked = [{**told, "content": _mark()} if place in said else told for place, told in enumerate(dicts)]
    try:
        shown = render(marked)
        missing = [place for place in said if marked[place]["content"] not in shown]
        return [turns[place] for place in missing if render(_changed(marked, place)) == shown]
    except ConfigurationError:  # it looks into contents, and has taken these
        return []


def _changed(dicts: Sequence[dict[str, Any]], place: int) -> list[dict[str, Any]]:
    return [{**told, "content": _mark()} if number == place else told for number, told in enumerate(dicts)]


def _mark() -> str:
    return f"zq{secrets.token_hex(6)}zq"


def _as_is(messages: Messages) -> tuple[Turn, ...]:
    return tuple(Turn((message,), message.role) for message in messages)


def _merged(messages: Messages) -> tuple[Turn, ...]:
    """Runs of one role become one turn; tool results stay apart, since each answers its own call."""
    turns: list[Turn] = []
    for message in messages:
        if turns and message.role == turns[-1].role and message.role != "tool":
            turns[-1] = Turn((*turns[-1].messages, message), message.role)
        else:
            turns.append(Turn((message,), message.role))
    return tuple(turns)


def _system_first(messages: Messages) -> tuple[Turn, ...]:
    system, others = _apart(messages)
    return (Turn(system, "system"), *others) if system else others


def _system_in_user(messages: Messages) -> tuple[Turn, ...]:
    system, others = _apart(messages)
    if system and others and others[0].role == "user":
        return (Turn((*system, *others[0].messages), "user"), *others[1:])
    return (Turn(system, "user"), *others) if system else others


def _apart(messages: Messages) -> tuple[tuple[ChatMessage, ...], tuple[Turn, ...]]:
    """System messages, and turns of all others."""
    system = tuple(message for message in messages if message.role in SYSTEM_ROLES)
    return system, _merged([message for message in messages if message.role not in SYSTEM_ROLES])


def _with_known_role(message: ChatMessage) -> ChatMessage:
    if message.role in SYSTEM_ROLES:
        return replace(message, role="system")
    return message if message.role in _ROLES else replace(message, role="user")


def _calls_apart(messages: Messages) -> list[ChatMessage]:
    """Each of several calls in a message of its own, followed by its result."""
    apart: list[ChatMessage] = []
    left = list(messages)
    while left:
        message = left.pop(0)
        if len(message.tool_calls) < 2:
            apart.append(message)
            continue
        results = list(takewhile(lambda following: following.role == "tool", left))  # ids may come again later
        del left[: len(results)]
        for number, call in enumerate(message.tool_calls):
            apart.append(replace(message, content="" if number else message.content, tool_calls=(call,)))
            own = [result for result in results if result.tool_call_id == call.get("id")]
            apart += own
            results = [result for result in results if result not in own]
        apart += results
    return apart


def _as_text(messages: Messages) -> list[ChatMessage]:
    """Calls and results as text. A result keeps its id and name, which tell what it is."""
    names = tool_names(messages)
    told: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            name = message.name or names.get(message.tool_call_id or "") or "tool"
            note = ChatMessage("user", f"Result of {name}:")
            told += [note, replace(message, role="user", name=name, tool_call_id=message.tool_call_id or "")]
        elif message.tool_calls:
            told.append(calls_as_text(message))
        else:
            told.append(message)
    return told


def calls_as_text(message: ChatMessage) -> ChatMessage:
    """A message whose calls are part of its text, each between ``<tool_call>`` tags."""
    lines = [message.content] if message.content else []
    for call in message.tool_calls:
        name, given = json.dumps(call["function"]["name"]), call["function"].get("arguments", {})
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        lines.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments or "{}"}}}\n</tool_call>')
    return replace(message, content="\n".join(lines), tool_calls=())
