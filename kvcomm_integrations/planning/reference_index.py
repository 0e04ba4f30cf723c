"""Which references are held or reserved, within a byte budget, and for whom."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile

from kvcomm_integrations.planning.content_keys import ContentKey
from kvcomm_integrations.planning.entries import Clock, Entry, EntryState, Reservation, victims
from kvcomm_integrations.planning.ngram_index import NgramIndex

ACKNOWLEDGE_STEPS = 64
"""Steps after which an acknowledgement that has not come is lost. vLLM schedules only a few steps ahead."""


@dataclass
class Scope:
    """References that the same requests may load."""

    last_use: float
    refs: set[int] = field(default_factory=set)
    live: int = 0
    """Requests that are running or waiting."""


class ScopeTable:
    """Scopes with references or live requests, the longest idle first."""

    def __init__(self) -> None:
        self._scopes: OrderedDict[str, Scope] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scopes)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._scopes))

    def refs(self, name: str) -> tuple[int, ...]:
        """References of a scope."""
        return tuple(self._scopes[name].refs) if name in self._scopes else ()

    def active(self, name: str) -> bool:
        """Whether a request of the scope is live."""
        return name in self._scopes and self._scopes[name].live > 0

    def enter(self, name: str, now: float) -> None:
        """A request of the scope has arrived."""
        self.use(name, now).live += 1

    def leave(self, name: str, now: float) -> None:
        """It has ended."""
        self.use(name, now).live -= 1
        self._tidy(name)

    def use(self, name: str, now: float) -> Scope:
        """The scope is in use at this moment."""
        scope = self._scopes.setdefault(name, Scope(now))
        scope.last_use = now
        self._scopes.move_to_end(name)
        return scope

    def remove(self, name: str, ref_id: int) -> None:
        """The scope holds one reference less; without references and requests it is forgotten."""
        if name in self._scopes:
            self._scopes[name].refs.discard(ref_id)
            self._tidy(name)

    def idle(self, before: float) -> list[str]:
        """Scopes without live requests that were used last before a moment."""
        old = takewhile(lambda item: item[1].last_use < before, self._scopes.items())
        return [name for name, scope in old if not scope.live]

    def _tidy(self, name: str) -> None:
        scope = self._scopes[name]
        if not scope.refs and scope.live <= 0:
            del self._scopes[name]


class ReferenceIndex:
    """References by content, within a byte budget. Those worth least go first (see ``entries``); reserved ones stay.

    Args:
        budget: bytes that references may take on one worker.
        bytes_per_token: bytes of one token's KV on one worker.
        ranks: workers that must acknowledge a reference.
        tenant_share: largest share of the budget for one tenant.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        budget: int,
        bytes_per_token: int,
        ranks: int,
        tenant_share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = budget
        self.quota = int(budget * tenant_share)
        self.bytes_per_token = bytes_per_token
        self.ranks = ranks
        self.used = 0
        self.evictions = 0
        self.expired = 0
        """References dropped because nobody used their session any more."""
        self.lost = 0
        """References whose acknowledgement never came."""
        self.scopes = ScopeTable()
        self.clock = clock
        self._worth = Clock()
        self._entries: OrderedDict[ContentKey, Entry] = OrderedDict()
        self._by_id: dict[int, Entry] = {}
        self._by_tenant: Counter[str] = Counter()
        self._due: OrderedDict[int, int] = OrderedDict()
        """Step by which a reference must be acknowledged."""
        self._ids = count(1)
        self._drops: list[int] = []
        self._ngrams = NgramIndex()

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, key: ContentKey) -> Entry | None:
        """The entry for a content, ready or reserved."""
        return self._entries.get(key)

    def find(self, key: ContentKey, ids: Sequence[int]) -> tuple[Entry | None, int]:
        """The entry that holds a content, ready or reserved, and the content's first token in it.

        Args:
            key: the content's key.
            ids: its token ids, by which it is found as a part of another content.
        """
        entry = self._entries.get(key)
        run = None if entry is not None else self._ngrams.find(key.scope, ids)
        return (entry, 0) if run is None else (self._by_id.get(run.ref_id), run.offset)

    def longest_part(self, scope: str, ids: Sequence[int], start: int) -> int:
        """How many tokens from ``start`` on some content holds in a row."""
        return self._ngrams.longest(scope, ids, start)

    def touch(self, entry: Entry) -> None:
        """Count a use."""
        entry.uses += 1
        self._worth.rate(entry)
        self.scopes.use(entry.key.scope, self.clock())
        self._entries.move_to_end(entry.key)

    def reserve(self, wanted: Reservation, searchable: Sequence[int] = ()) -> Entry | None:
        """Announce a reference that a request is about to compute, evicting others to make room.

        Args:
            wanted: what will be held.
            searchable: the content's token ids, if parts of it shall be found too.

        Returns:
            ``None`` if the content is held or reserved already, or cannot fit.
        """
        nbytes = wanted.tokens * self.bytes_per_token
        if wanted.key in self._entries or wanted.tokens <= 0 or not self._make_room(nbytes, wanted.tenant):
            return None
        entry = Entry(next(self._ids), wanted, nbytes)
        self._worth.rate(entry)
        self._entries[entry.key] = entry
        self._by_id[entry.ref_id] = entry
        self.used += nbytes
        self._by_tenant[wanted.tenant] += nbytes
        self.scopes.use(entry.key.scope, self.clock()).refs.add(entry.ref_id)
        self._ngrams.add(entry.ref_id, entry.key.scope, searchable)
        return entry

    def acknowledge(self, ref_id: int, ranks: int) -> None:
        """Count ranks that hold a reference; it is ready once all do."""
        entry = self._by_id.get(ref_id)
        if entry is None:
            return
        entry.acknowledged += ranks
        if entry.acknowledged >= self.ranks:
            entry.state = EntryState.READY
            self._due.pop(ref_id, None)

    def ordered(self, ref_id: int, step: int) -> None:
        """The workers have been told to harvest a reserved reference in this step."""
        entry = self._by_id.get(ref_id)
        if entry is not None and entry.state is EntryState.RESERVED:
            self._due[ref_id] = step + ACKNOWLEDGE_STEPS

    def tidy(self, step: int, idle_s: float) -> None:
        """Forget references whose acknowledgement is lost, and those of sessions that have been idle for too long."""
        while self._due and next(iter(self._due.values())) < step:
            self.withdraw(next(iter(self._due)))
            self.lost += 1
        for scope in self.scopes.idle(self.clock() - idle_s):
            self.expired += self.withdraw_scope(scope)

    def by_id(self, ref_id: int) -> Entry | None:
        """The entry of a reference number."""
        return self._by_id.get(ref_id)

    def entries(self) -> tuple[Entry, ...]:
        """All entries, least recently used first."""
        return tuple(self._entries.values())

    def withdraw(self, ref_id: int) -> None:
        """Forget a reference (a reservation given up, a failed harvest, an eviction) and have workers drop it."""
        entry = self._by_id.pop(ref_id, None)
        if entry is None:
            return
        del self._entries[entry.key]
        self.used -= entry.nbytes
        self._by_tenant[entry.reserved.tenant] -= entry.nbytes
        if not self._by_tenant[entry.reserved.tenant]:
            del self._by_tenant[entry.reserved.tenant]
        self._due.pop(ref_id, None)
        self.scopes.remove(entry.key.scope, ref_id)
        self._ngrams.remove(ref_id)
        self._drops.append(ref_id)

    def withdraw_scope(self, scope: str) -> int:
        """Forget every reference of a scope; returns how many there were."""
        gone = self.scopes.refs(scope)
        for ref_id in gone:
            self.withdraw(ref_id)
        return len(gone)

    def withdraw_owner(self, owner: str) -> None:
        """Forget what a request has reserved and not delivered."""
        for entry in self.entries():
            if entry.reserved.owner == owner and not entry.ready:
                self.withdraw(entry.ref_id)

    def clear(self) -> None:
        """Forget everything."""
        for ref_id in list(self._by_id):
            self.withdraw(ref_id)

    def take_drops(self) -> list[int]:
        """References that workers are to drop, each told once."""
        drops, self._drops = self._drops, []
        return drops

    def tenant_bytes(self, tenant: str) -> int:
        """Bytes of a tenant's references."""
        return self._by_tenant.get(tenant, 0)

    def _make_room(self, nbytes: int, tenant: str) -> bool:
        """Evict until a reference fits into its tenant's share and into the whole; nothing goes if it cannot fit."""
        over_share = self.tenant_bytes(tenant) + nbytes - self.quota
        over = self.used + nbytes - self.budget
        if over_share <= 0 and over <= 0:
            return True
        candidates = victims(self._entries.values(), self.scopes.active)
        own = [entry for entry in candidates if entry.reserved.tenant == tenant]
        chosen = _enough(own, over_share)
        over -= sum(entry.nbytes for entry in chosen)
        taken = {entry.ref_id for entry in chosen}
        chosen += _enough([entry for entry in candidates if entry.ref_id not in taken], over)
        freed = sum(entry.nbytes for entry in chosen)
        if over_share > sum(entry.nbytes for entry in own) or self.used - freed + nbytes > self.budget:
            return False
        for entry in chosen:
            self._worth.evicted(entry)
            self.withdraw(entry.ref_id)
            self.evictions += 1
        return True


def _enough(candidates: Sequence[Entry], nbytes: int) -> list[Entry]:
    """The first candidates that together take so many bytes."""
    chosen: list[Entry] = []
    for entry in candidates:
        if nbytes <= 0:
            break
        chosen.append(entry)
        nbytes -= entry.nbytes
    return chosen
