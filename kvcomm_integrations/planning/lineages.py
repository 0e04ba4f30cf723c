"""An agent's own past: what its next prompt may find again of blocks that hold estimates.

The next turn of a conversation repeats the agent's last prompt word for word, its answer included. Blocks that hold an
estimate are hidden from the exact prefix cache under hashes that only their *lineage* can compute: the requests of one
tenant, session, agent and policy. A request of the lineage whose tokens agree up to the end of the first hidden block
takes them over, by vLLM's own prefix cache, with its reference counts and its eviction. Nobody else finds them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from cachetools import LRUCache

from kvcomm_integrations.planning.plan import Plan
from kvcomm_integrations.planning.resolved_prompt import ResolvedPrompt

MOST_LINEAGES = 1 << 14
"""Lineages that are remembered; the least recently used one is forgotten, and with it what it could find again."""
MOST_ROOTS = 64
"""First hidden blocks that are remembered of a lineage: one for each fork of its conversation."""
MOST_BLOCKS = 1 << 17
"""Blocks of which it is remembered how many of their tokens are an estimate."""


def _few() -> LRUCache[bytes, bool]:
    return LRUCache(MOST_ROOTS)


@dataclass(eq=False)
class Lineage:
    """What the requests of one agent in one session have in common."""

    secret: bytes = field(default_factory=lambda: os.urandom(16))
    roots: LRUCache[bytes, bool] = field(default_factory=_few)
    """Exact hashes of first hidden blocks."""

    def hide(self, exact: bytes) -> bytes:
        """The hash under which a block with an estimate is filed, from the exact one of its tokens and all before."""
        return blake2b(exact, key=self.secret, digest_size=32).digest()

    def root_of(self, hashes: Sequence[bytes]) -> int | None:
        """The first block of a prompt that is hidden, by the exact hashes of its blocks; ``None``: none of them is."""
        return next((number for number, value in enumerate(hashes) if value in self.roots), None)


class Lineages:
    """The lineages of one engine."""

    def __init__(self) -> None:
        self._known: LRUCache[tuple[str, ...], Lineage] = LRUCache(MOST_LINEAGES)
        self._estimated: LRUCache[bytes, int] = LRUCache(MOST_BLOCKS)

    def of(self, prompt: ResolvedPrompt) -> Lineage:
        """The lineage of a request."""
        lineage = self._known.get(_key(prompt))
        if lineage is None:
            lineage = self._known[_key(prompt)] = Lineage()
        return lineage

    def forget(self, prompt: ResolvedPrompt) -> None:
        """What a lineage has filed is not found again by anyone: its blocks may not hold what they should."""
        self._known.pop(_key(prompt), None)

    def forget_session(self, tenant: str, session: str) -> None:
        """Forget the lineages of all agents of a session."""
        for key in [key for key in self._known if key[:2] == (tenant, session)]:
            del self._known[key]

    def clear(self) -> None:
        """Forget all of them, as after a change of the model's weights."""
        self._known.clear()
        self._estimated.clear()

    def note_estimates(self, plan: Plan, hashes: Sequence[bytes], block: int) -> None:
        """Remember how many tokens of each block a plan has loaded.

        Args:
            plan: it has been carried out.
            hashes: under which the request's blocks are filed.
            block: tokens of a block.
        """
        for span in plan.spans:
            for number in () if span.exact else range(span.start // block, -(-span.end // block)):
                if number < len(hashes):
                    tokens = min(span.end, (number + 1) * block) - max(span.start, number * block)
                    self._estimated[hashes[number]] = min(block, self._estimated.get(hashes[number], 0) + tokens)

    def estimates(self, hashes: Iterable[bytes]) -> int:
        """Tokens of these blocks whose KV is an estimate, as far as that is remembered."""
        return sum(self._estimated.get(value, 0) for value in hashes)


def _key(prompt: ResolvedPrompt) -> tuple[str, ...]:
    return (prompt.params.tenant, prompt.params.session, prompt.agent, prompt.policy)
