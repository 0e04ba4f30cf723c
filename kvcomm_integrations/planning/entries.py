"""What the index remembers of one reference, and which references go first when memory is short.

A reference's worth is its expected saved work per byte: frequency times tokens (a little more for long contents, whose
attention costs more). It fades: the clock stands at the worth of what was evicted last, and a use sets a reference's
worth anew from there. References of sessions with live requests go last of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from kvcomm_integrations.planning.content_keys import ContentKey
from kvcomm_integrations.reuse.edge import Edge


class EntryState(Enum):
    """Reserved entries are being computed by a request; ready ones are acknowledged by every rank."""

    RESERVED = auto()
    READY = auto()


@dataclass(frozen=True)
class Reservation:
    """A reference that a request is about to compute."""

    key: ContentKey
    tokens: int
    """Tokens whose KV it will hold: one fewer than the content has where the last sampled token belongs to it."""
    name: str
    """Placeholder, or name of the template text; empty for what makes no edge of its own."""
    source: str
    """Agent in whose prompt it is computed."""
    dense: bool
    """Nothing approximate stands before it in that prompt."""
    owner: str = ""
    """The request, while it has not delivered."""
    tenant: str = ""
    """Whose share of the budget it takes."""
    exact: bool = False
    """The beginning of a prompt, to be copied exactly to the same positions, whatever follows it."""
    produced: bool = False
    """An answer, held as its producer computed it."""
    length: int = 0
    """Tokens of the whole content, whether or not the last one's KV is held."""
    before: str = ""
    """Digest of the row before the content; empty if nothing may join on to it."""
    after: str = ""
    """Digest of the row up to the content's end."""


@dataclass
class Entry:
    """One reference of the index: what was reserved, and what has become of it since."""

    ref_id: int
    reserved: Reservation
    nbytes: int
    state: EntryState = EntryState.RESERVED
    uses: int = 0
    acknowledged: int = 0
    """Ranks that hold it."""
    worth: float = 0.0
    """Expected saved work per byte."""
    leverage: dict[tuple[str, Edge], float] = field(default_factory=dict)
    """How new the content is to an edge, by (policy, edge)."""
    last_consumer: str = ""
    """Agent that had the content in its prompt last; empty while only the producer knows it."""
    last_dense: bool = False
    """That agent's prompt was computed densely."""

    @property
    def key(self) -> ContentKey:
        """Under which it is held."""
        return self.reserved.key

    @property
    def tokens(self) -> int:
        """Tokens whose KV is held."""
        return self.reserved.tokens

    @property
    def source(self) -> str:
        """Agent in whose prompt it was computed."""
        return self.reserved.source

    @property
    def ready(self) -> bool:
        """Every rank holds it."""
        return self.state is EntryState.READY


@dataclass(frozen=True)
class Held:
    """What the index holds for one segment: an entry, ready or reserved, and the segment's first token in it."""

    entry: Entry | None = None
    offset: int = 0

    @property
    def ready(self) -> Entry | None:
        """The entry, if every worker holds it."""
        return self.entry if self.entry is not None and self.entry.ready else None


Holdings = tuple[Held, ...]
"""By segment of a prompt."""


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
