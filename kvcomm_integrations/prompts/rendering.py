"""Finds out where contents end up in a rendered prompt, whatever the template does to them.

The messages are rendered twice: once as they are, once with *nonce brackets* (random letters and digits) around each
content of interest. If taking the nonces out again gives the first rendering to the letter, they mark where the
contents are. If not, the template reacted to them (it trimmed, cut or tested the content), and the brackets of the
messages at fault are left out: fewer contents are located, and the prompt's text is never anything but the template's.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcomm_integrations.prompts.codec import Span

RenderContents = Callable[[Sequence[str]], str]
"""Renders the conversation with these contents in place of the messages' own. May raise ``TemplateRefusal``."""


class TemplateRefusal(Exception):
    """The template does not accept a bracketed conversation."""


@dataclass(frozen=True)
class Located:
    """Content ``span`` of message ``message`` stands at ``[start, end)`` of the prompt's text, characters."""

    start: int
    end: int
    message: int
    span: int


def locate(
    text: str, contents: Sequence[str], spans: Sequence[Sequence[Span]], render: RenderContents
) -> list[Located]:
    """Where each span of each content stands in the prompt.

    Args:
        text: the prompt, rendered from ``contents`` as they are.
        contents: one text per message.
        spans: per message, the ``[start, end)`` of interest, characters: in order, not overlapping, and with no
            whitespace at either edge.
        render: renders other contents in the same conversation.

    Returns:
        What could be located, in text order, without overlaps. A span is missing if the template dropped or changed
        it, and there twice if the template wrote it twice.
    """
    nonce = _nonce(text)
    marks = re.compile(nonce + r"([be])([0-9a-f]{5})x([0-9a-f]{5})z")
    accepted: set[int] = set()
    found: list[Located] = []
    wanted = [message for message, own in enumerate(spans) if own]
    waiting = [wanted] if wanted else []
    while waiting:
        messages = waiting.pop()
        chosen = accepted.union(messages)
        bracketed = [_bracket(c, spans[i], nonce, i) if i in chosen else c for i, c in enumerate(contents)]
        try:
            result = _read_marks(render(bracketed), marks, text)
        except TemplateRefusal:
            result = None
        if result is not None:
            accepted, found = chosen, result
        elif len(messages) > 1:
            half = len(messages) // 2
            waiting += [messages[half:], messages[:half]]
    return [
        place
        for place in found
        if text[place.start : place.end] == contents[place.message][slice(*spans[place.message][place.span])]
    ]


def _nonce(text: str) -> str:
    while True:
        nonce = "K" + secrets.token_hex(8)
        if nonce not in text:
            return nonce


def _bracket(content: str, spans: Sequence[Span], nonce: str, message: int) -> str:
    pieces: list[str] = []
    at = 0
    for i, (start, end) in enumerate(spans):
        label = f"{message:05x}x{i:05x}z"
        pieces += [content[at:start], nonce, "b", label, content[start:end], nonce, "e", label]
        at = end
    return "".join([*pieces, content[at:]])


def _read_marks(marked: str, marks: re.Pattern[str], text: str) -> list[Located] | None:
    """Spans between paired marks; ``None`` if ``marked`` without its marks is not ``text``, or marks do not pair."""
    pieces: list[str] = []
    located: list[Located] = []
    at = length = 0
    opened: tuple[int, int, int] | None = None
    for mark in marks.finditer(marked):
        pieces.append(marked[at : mark.start()])
        length += mark.start() - at
        at = mark.end()
        label = int(mark[2], 16), int(mark[3], 16)
        if mark[1] == "b" and opened is None:
            opened = (length, *label)
        elif mark[1] == "e" and opened is not None and opened[1:] == label:
            located.append(Located(opened[0], length, *label))
            opened = None
        else:
            return None
    pieces.append(marked[at:])
    return located if opened is None and "".join(pieces) == text else None
