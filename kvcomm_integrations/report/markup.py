"""HTML by functions: whatever is not markup already is escaped, so no name or text can become part of a page."""

from __future__ import annotations

import html
from typing import Any

_PICTURES = 0x2400
"""Start of Unicode's pictures of control characters."""


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object) -> Markup:
    """A value as escaped text; control characters and halves of characters become visible."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(visible(str(value))))


def visible(words: str) -> str:
    """``words`` with control characters as pictures, and nothing that turns the direction of writing."""
    return "".join(map(_visible, words))


def join(*children: object) -> Markup:
    """Children one after another; ``None`` is left out, lists are flattened."""
    parts = []
    for child in children:
        if isinstance(child, (list, tuple)):
            parts.append(join(*child))
        elif child is not None:
            parts.append(text(child))
    return Markup("".join(parts))


def tag(name: str, /, *children: object, **attributes: Any) -> Markup:
    """An element.

    Args:
        name: the element's name.
        children: text, markup, or lists of these.
        attributes: ``class_`` and the like lose their last underscore, others become dashes; ``None`` and ``False``
            are left out, ``True`` stands alone.
    """
    inside = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in ("meta", "link", "br", "hr"):
        return Markup(f"<{name}{inside}>")
    return Markup(f"<{name}{inside}>{join(*children)}</{name}>")


def _attribute(key: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{text(value)}"'


def _visible(character: str) -> str:
    if character < " " and character not in "\n\t":
        return chr(_PICTURES + ord(character))
    if "\x7f" <= character <= "\x9f" or "\ud800" <= character <= "\udfff" or character in "\u202a\u202b\u202d\u202e":
        return "\ufffd"
    return character
