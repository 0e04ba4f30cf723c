"""An agent's own past: what its next prompt may find again of blocks that hold estimates.

The next turn of a conversation repeats the agent's last prompt word for word, its answer included. Blocks that hold an
estimate are hidden from the exact prefix cache under hashes that only their *lineage* can compute: the requests of one
tenant, session, agent and policy. A request of the lineage takes them over where its tokens agree and nothing exact
reaches as far, by vLLM's own prefix cache, with its reference counts and its eviction. Nobody else finds them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from cachetools import LRUCache

from kvcomm_integrations.planning.plan import Plan
from kvcomm_integrations.planning.resolved_prompt import ResolvedPrompt

MOST_LINEAGES = 1 << 14
"""Lineages that are remembered; the least recently used one is forgotten, and with it what it could find again."""
MOST_BLOCKS = 1 << 17
"""Blocks of which it is remembered how many of their tokens are an estimate."""


@dataclass(eq=False)
class Lineage:
    """What the requests of one agent in one session have in common."""

    secret: bytes = field(default_factory=lambda: os.urandom(16))
    used: bool = False
    """Blocks may be filed under its hashes."""
    forgotten: bool = False
    """None of them is to be found any more, not even by requests that arrived while they were."""

    def hide(self, exact: bytes) -> bytes:
        """The hash under which a block with an estimate is filed, from the exact one of its tokens and all before."""
        return blake2b(exact, key=self.secret, digest_size=32).digest()


class Lineages:
    """The lineages of one engine."""

    def __init__(self) -> None:
        self._known: LRUCache[tuple[str, ...], Lineage] = LRUCache(MOST_LINEAGES)
        self._estimated: LRUCache[bytes, int] = LRUCache(MOST_BLOCKS)
        self._settled: LRUCache[bytes, bool] = LRUCache(MOST_BLOCKS)

    def of(self, prompt: ResolvedPrompt) -> Lineage:
        """The lineage of a request."""
        lineage = self._known.get(prompt.lineage)
        if lineage is None:
            lineage = self._known[prompt.lineage] = Lineage()
        return lineage

    def forget(self, prompt: ResolvedPrompt) -> None:
        """What a lineage has filed is not found again by anyone: its blocks may not hold what they should."""
        self._forget(prompt.lineage)

    def forget_session(self, tenant: str, session: str) -> None:
        """Forget the lineages of all agents of a session."""
        for key in [key for key in self._known if key[:2] == (tenant, session)]:
            self._forget(key)

    def clear(self) -> None:
        """Forget all of them, as after a change of the model's weights."""
        for key in list(self._known):
            self._forget(key)
        self._estimated.clear()

    def note_estimates(self, plan: Plan, hashes: Sequence[bytes], block: int) -> None:
        """Remember how many tokens of each block a plan loads.

        Args:
            plan: of a request that has been given blocks.
            hashes: under which they are filed.
            block: tokens of a block.
        """
        loaded: Counter[int] = Counter()
        for span in plan.spans:
            for number in () if span.exact else range(span.start // block, -(-span.end // block)):
                loaded[number] += min(span.end, (number + 1) * block) - max(span.start, number * block)
        for number in range(plan.exact // block, len(hashes)):  # these are written anew
            if loaded[number]:
                self._estimated[hashes[number]] = loaded[number]
            else:
                self._estimated.pop(hashes[number], None)

    def estimates(self, hashes: Iterable[bytes]) -> int:
        """Tokens of these blocks whose KV is an estimate, as far as that is remembered."""
        return sum(self._estimated.get(value, 0) for value in hashes)

    def settle(self, hashes: Iterable[bytes]) -> None:
        """Remember blocks that were computed exactly while nobody waited."""
        self._settled.update(dict.fromkeys(hashes, True))

    def compute(self, hashes: Iterable[bytes]) -> None:
        """Somebody computes these blocks anew, so they are no longer what was computed while nobody waited."""
        for value in hashes:
            self._settled.pop(value, None)

    def settled(self, hashes: Iterable[bytes]) -> int:
        """How many of these blocks were."""
        return sum(value in self._settled for value in hashes)

    def _forget(self, key: tuple[str, ...]) -> None:
        lineage = self._known.pop(key, None)
        if lineage is not None:
            lineage.forgotten = True
