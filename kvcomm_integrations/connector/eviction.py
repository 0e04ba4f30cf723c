"""Which references to give up first: those whose expected saved work per byte is least.

Saved work is frequency times tokens (a little more for long contents, whose attention costs more), and it fades: the
clock stands at the worth of what was evicted last, and a use sets a reference's worth anew from there. References of
sessions with live requests go last of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvcomm_integrations.connector.entries import Entry, EntryState

LONG_TOKENS = 4096
"""Length from which attention costs about as much as everything else."""


class Clock:
    """The worth of references, and what it takes to stay."""

    def __init__(self) -> None:
        self.now = 0.0

    def rate(self, entry: Entry) -> None:
        """Set an entry's worth after it was made or used."""
        entry.worth = self.now + (1 + entry.uses) * (1 + entry.tokens / LONG_TOKENS)

    def evicted(self, entry: Entry) -> None:
        """What stays from now on must be worth more than this."""
        self.now = max(self.now, entry.worth)


def victims(entries: Iterable[Entry], active: Callable[[str], bool]) -> list[Entry]:
    """The entries that may be evicted, first to last. What is still being computed may not."""
    ready = [entry for entry in entries if entry.state is EntryState.READY]
    return sorted(ready, key=lambda entry: (active(entry.key.scope), entry.worth))
