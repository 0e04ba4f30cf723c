"""The scheduler half's view of the reference store: what is held, promised, and worth keeping. Holds no tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import NamedTuple

from kvcomm_integrations.connector.runs import RunIndex


class ContentKey(NamedTuple):
    """Who may share a content, and the hash of its tokens."""

    scope: str
    content: str


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
    leverage: dict[tuple[str, object], float] = field(default_factory=dict)
    """By (policy, edge)."""


class ReferenceIndex:
    """References by content, within a byte budget. Least recently used go first; promised ones stay.

    Args:
        budget: bytes that references may take on one worker.
        bytes_per_token: bytes of one token's KV on one worker.
        ranks: workers that must acknowledge a reference.
    """

    def __init__(self, budget: int, bytes_per_token: int, ranks: int) -> None:
        self.budget = budget
        self.bytes_per_token = bytes_per_token
        self.ranks = ranks
        self.used = 0
        self.evictions = 0
        self._entries: OrderedDict[ContentKey, Entry] = OrderedDict()
        self._by_id: dict[int, Entry] = {}
        self._ids = count(1)
        self._drops: list[int] = []
        self._runs = RunIndex()

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, key: ContentKey) -> Entry | None:
        """The entry for a content, ready or promised."""
        return self._entries.get(key)

    def find_part(self, scope: str, ids: Sequence[int]) -> tuple[Entry, int] | None:
        """The response that holds these tokens in a row, and from which of its tokens on."""
        run = self._runs.find(scope, ids)
        entry = self._by_id.get(run.ref_id) if run is not None else None
        return (entry, run.offset) if run is not None and entry is not None else None

    def touch(self, entry: Entry) -> None:
        """Count a use."""
        entry.uses += 1
        self._entries.move_to_end(entry.key)

    def promise(
        self,
        key: ContentKey,
        tokens: int,
        *,
        name: str,
        source: str,
        dense: bool,
        owner: str,
        exact: bool = False,
        parts_of: Sequence[int] = (),
    ) -> Entry | None:
        """Announce a reference that ``owner`` is about to compute, evicting older ones to make room.

        Args:
            exact: the content begins a prompt and will be copied to the same positions.
            parts_of: the content's token ids, if parts of it shall be found too.

        Returns:
            ``None`` if the content is held or promised already, or cannot fit.
        """
        nbytes = tokens * self.bytes_per_token
        if key in self._entries or tokens <= 0 or not self._make_room(nbytes):
            return None
        entry = Entry(next(self._ids), key, tokens, nbytes, name, source, dense, owner, exact=exact)
        self._entries[key] = entry
        self._by_id[entry.ref_id] = entry
        self.used += nbytes
        self._runs.add(entry.ref_id, key.scope, parts_of)
        return entry

    def acknowledge(self, ref_id: int, ranks: int) -> None:
        """Count ranks that hold a reference; it is ready once all do."""
        entry = self._by_id.get(ref_id)
        if entry is None:
            return
        entry.acknowledged += ranks
        if entry.acknowledged >= self.ranks:
            entry.state = EntryState.READY

    def by_id(self, ref_id: int) -> Entry | None:
        """The entry of a reference number."""
        return self._by_id.get(ref_id)

    def entries(self) -> tuple[Entry, ...]:
        """All entries, least recently used first."""
        return tuple(self._entries.values())

    def withdraw(self, ref_id: int) -> None:
        """Forget a reference (a broken promise, a failed harvest, an eviction) and have workers drop it."""
        entry = self._by_id.pop(ref_id, None)
        if entry is None:
            return
        del self._entries[entry.key]
        self.used -= entry.nbytes
        self._runs.remove(ref_id)
        self._drops.append(ref_id)

    def withdraw_scope(self, scope: str) -> int:
        """Forget every reference of a scope; returns how many there were."""
        gone = [entry.ref_id for entry in self._entries.values() if entry.key.scope == scope]
        for ref_id in gone:
            self.withdraw(ref_id)
        return len(gone)

    def clear(self) -> None:
        """Forget everything."""
        for ref_id in list(self._by_id):
            self.withdraw(ref_id)

    def take_drops(self) -> list[int]:
        """References that workers are to drop, each told once."""
        drops, self._drops = self._drops, []
        return drops

    def _make_room(self, nbytes: int) -> bool:
        if nbytes > self.budget:
            return False
        if self.used + nbytes <= self.budget:
            return True
        ready = [entry for entry in self._entries.values() if entry.state is EntryState.READY]
        if self.used - sum(entry.nbytes for entry in ready) + nbytes > self.budget:
            return False  # promises take too much: nothing is gained by evicting the rest
        for entry in ready:
            self.withdraw(entry.ref_id)
            self.evictions += 1
            if self.used + nbytes <= self.budget:
                return True
        return False
