"""The scheduler half's view of the reference store: what is held, promised, and worth keeping. Holds no tensors."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import count

from kvcomm_integrations.connector.entries import ContentKey, Entry, EntryState
from kvcomm_integrations.connector.eviction import Clock, victims
from kvcomm_integrations.connector.runs import RunIndex
from kvcomm_integrations.connector.scopes import ScopeBook

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
        self.scopes = ScopeBook()
        self.clock = clock
        self._worth = Clock()
        self._entries: OrderedDict[ContentKey, Entry] = OrderedDict()
        self._by_id: dict[int, Entry] = {}
        self._by_tenant: Counter[str] = Counter()
        self._due: OrderedDict[int, int] = OrderedDict()
        """Step by which a reference must be acknowledged."""
        self._ids = count(1)
        self._drops: list[int] = []
        self._runs = RunIndex()

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
        if entry is not None and entry.state is EntryState.PROMISED:
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
        promised = [e.ref_id for e in self._entries.values() if e.owner == owner and e.state is EntryState.PROMISED]
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
