"""The scheduler half's view of the reference store: what is held, promised, and worth keeping. Holds no tensors."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import NamedTuple

from kvcomm_integrations.planning.ngram_index import NgramIndex


class ContentKey(NamedTuple):
    """Who may share a content, and the hash of its tokens; for chain references, also who consumed it."""

    scope: str
    content: str
    consumer: str = ""


class EntryState(Enum):
    """Promised entries are being computed by a request; ready ones are acknowledged by every rank."""

    RESERVED = auto()
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
    state: EntryState = EntryState.RESERVED
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
        scope = self._scopes.get(name)
        return tuple(scope.refs) if scope is not None else ()

    def active(self, name: str) -> bool:
        """Whether a request of the scope is live."""
        scope = self._scopes.get(name)
        return scope is not None and scope.live > 0

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

    def add(self, name: str, ref_id: int, now: float) -> None:
        """A scope holds one more reference."""
        self.use(name, now).refs.add(ref_id)

    def remove(self, name: str, ref_id: int) -> None:
        """It holds one less; a scope without references and requests is forgotten."""
        scope = self._scopes.get(name)
        if scope is not None:
            scope.refs.discard(ref_id)
            self._tidy(name)

    def idle(self, before: float) -> list[str]:
        """Scopes without live requests that were used last before a moment."""
        found = []
        for name, scope in self._scopes.items():
            if scope.last_use >= before:
                break
            if not scope.live:
                found.append(name)
        return found

    def _tidy(self, name: str) -> None:
        scope = self._scopes[name]
        if not scope.refs and scope.live <= 0:
            del self._scopes[name]


__all__ = ["ContentKey", "Entry", "EntryState", "ReferenceIndex"]

ACKNOWLEDGE_STEPS = 64
"""Steps after which an acknowledgement that has not come is lost. vLLM schedules only a few steps ahead."""


class ReferenceIndex:
    """References by content, within a byte budget. Those worth least go first (see ``eviction``); promised ones stay.

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
        self._runs = NgramIndex()

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, key: ContentKey) -> Entry | None:
        """The entry for a content, ready or promised."""
        return self._entries.get(key)

    def find_part(self, scope: str, ids: Sequence[int]) -> tuple[Entry, int] | None:
        """The reference that holds these tokens in a row, and from which of its tokens on."""
        run = self._runs.find(scope, ids)
        entry = self._by_id.get(run.ref_id) if run is not None else None
        return (entry, run.offset) if run is not None and entry is not None else None

    def longest_part(self, scope: str, ids: Sequence[int], start: int) -> int:
        """How many tokens from ``start`` on some content holds in a row."""
        return self._runs.longest(scope, ids, start)

    def touch(self, entry: Entry) -> None:
        """Count a use."""
        entry.uses += 1
        self._worth.rate(entry)
        self.scopes.use(entry.key.scope, self.clock())
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
        tenant: str = "",
        produced: bool = False,
        before: str = "",
        after: str = "",
        length: int | None = None,
    ) -> Entry | None:
        """Announce a reference that ``owner`` is about to compute, evicting others to make room.

        Args:
            exact: the content begins a prompt and will be copied to the same positions.
            parts_of: the content's token ids, if parts of it shall be found too.
            tenant: whose share of the budget it takes.
            produced: an answer, held as its producer computed it.
            before: digest of the row before the content, if others may join on to it.
            after: digest of the row up to the content's end.
            length: tokens of the whole content, if that is not ``tokens``.

        Returns:
            ``None`` if the content is held or promised already, or cannot fit.
        """
        nbytes = tokens * self.bytes_per_token
        if key in self._entries or tokens <= 0 or not self._make_room(nbytes, tenant):
            return None
        entry = Entry(
            next(self._ids),
            key,
            tokens,
            nbytes,
            name,
            source,
            dense,
            owner,
            exact=exact,
            tenant=tenant,
            produced=produced,
            length=tokens if length is None else length,
            before=before,
            after=after,
        )
        self._worth.rate(entry)
        self._entries[key] = entry
        self._by_id[entry.ref_id] = entry
        self.used += nbytes
        self._by_tenant[tenant] += nbytes
        self.scopes.add(key.scope, entry.ref_id, self.clock())
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
            self._due.pop(ref_id, None)

    def ordered(self, ref_id: int, step: int) -> None:
        """The workers have been told to harvest a promised reference in this step."""
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
        """Forget a reference (a broken promise, a failed harvest, an eviction) and have workers drop it."""
        entry = self._by_id.pop(ref_id, None)
        if entry is None:
            return
        del self._entries[entry.key]
        self.used -= entry.nbytes
        self._by_tenant[entry.tenant] -= entry.nbytes
        if not self._by_tenant[entry.tenant]:
            del self._by_tenant[entry.tenant]
        self._due.pop(ref_id, None)
        self.scopes.remove(entry.key.scope, ref_id)
        self._runs.remove(ref_id)
        self._drops.append(ref_id)

    def withdraw_scope(self, scope: str) -> int:
        """Forget every reference of a scope; returns how many there were."""
        gone = self.scopes.refs(scope)
        for ref_id in gone:
            self.withdraw(ref_id)
        return len(gone)

    def withdraw_owner(self, owner: str) -> None:
        """Forget what a request has promised and not delivered."""
        promised = [e.ref_id for e in self._entries.values() if e.owner == owner and e.state is EntryState.RESERVED]
        for ref_id in promised:
            self.withdraw(ref_id)

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
        own = [entry for entry in candidates if entry.tenant == tenant]
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
