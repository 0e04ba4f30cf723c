"""Numbers, texts and names as people read them, on the page and in the terminal."""

from __future__ import annotations

from datetime import UTC, datetime

from kvcomm_integrations.wire import TREATMENTS, SegmentReport

STYLES = dict(zip(TREATMENTS, ("green", "blue", "cyan", "yellow", "red"), strict=True))
"""Colours of what became of tokens, in the terminal."""
_SHOWN = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_SHOWN |= dict.fromkeys((*range(0x7F, 0xA0), *range(0xD800, 0xE000), 0x202A, 0x202B, 0x202D, 0x202E), "\ufffd")
"""What stands for characters that a terminal or browser would obey: Unicode has pictures of control characters."""


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
    return text.translate(_SHOWN)
