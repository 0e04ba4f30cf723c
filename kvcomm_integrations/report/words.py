"""Numbers, texts and names as people read them, on the page and in the terminal."""

from __future__ import annotations

from datetime import UTC, datetime

from kvcomm_integrations.wire import TREATMENTS, SegmentReport

STYLES = dict(zip(TREATMENTS, ("green", "blue", "cyan", "yellow", "red"), strict=True))
"""Colours of what became of tokens, in the terminal."""
_PICTURES = 0x2400
"""Start of Unicode's pictures of control characters."""


def milliseconds(value: float | None) -> str:
    """A duration; seconds from one second on."""
    if value is None:
        return "–"
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def share(part: float, whole: float) -> str:
    """A percentage; a dash where there is no whole."""
    return f"{100 * part / whole:.0f} %" if whole else "–"


def fixed(value: float | None, digits: int) -> str:
    """A number with this many digits after the point; a dash for ``None``."""
    return "–" if value is None else f"{value:.{digits}f}"


def moment(seconds: float) -> str:
    """A point in time, UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if seconds else "–"


def segment_title(segment: SegmentReport) -> str:
    """What a segment is called."""
    return segment.name or "template text"


def visible(text: str) -> str:
    """``text`` with control characters as pictures, and nothing that turns the direction of writing."""
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character < " " and character not in "\n\t":
        return chr(_PICTURES + ord(character))
    if "\x7f" <= character <= "\x9f" or "\ud800" <= character <= "\udfff" or character in "\u202a\u202b\u202d\u202e":
        return "\ufffd"
    return character
