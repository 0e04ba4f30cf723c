"""Numbers as people read them."""

from __future__ import annotations

from datetime import UTC, datetime


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


def moment(seconds: float) -> str:
    """A point in time, UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if seconds else "–"
