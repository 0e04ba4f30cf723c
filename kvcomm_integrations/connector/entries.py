"""What the index remembers of one reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple


class ContentKey(NamedTuple):
    """Who may share a content, and the hash of its tokens; for chain references, also who consumed it."""

    scope: str
    content: str
    consumer: str = ""


class EntryState(Enum):
    """Promised entries are being computed by a request; ready ones are acknowledged by every rank."""

    PROMISED = auto()
    READY = auto()


@dataclass
class Entry:
    """One reference. ``tokens`` may be fewer than the content has: the last sampled token's KV never exists."""

    ref_id: int
    key: ContentKey
    tokens: int
    nbytes: int
    name: str
    source: str
    dense: bool
    owner: str
    """Request that computes it, while promised."""
    state: EntryState = EntryState.PROMISED
    uses: int = 0
    acknowledged: int = 0
    exact: bool = False
    """The beginning of a prompt, to be copied exactly, whatever follows it."""
    tenant: str = ""
    """Whose share of the budget it takes."""
    worth: float = 0.0
    """Expected saved work per byte; see ``eviction``."""
    leverage: dict[tuple[str, object], float] = field(default_factory=dict)
    """By (policy, edge)."""
    produced: bool = False
    """An answer, held as its producer computed it."""
    last_consumer: str = ""
    """Agent that had the content in its prompt last; empty while only the producer knows it."""
    last_dense: bool = False
    """That agent's prompt was computed densely."""
    length: int = 0
    """Tokens of the whole content, whether or not the last one's KV is held."""
    before: str = ""
    """Digest of the row before the content; empty if nothing may join on to it."""
    after: str = ""
    """Digest of the row up to the content's end."""
