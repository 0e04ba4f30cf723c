"""Keeping approximate KV out of the exact prefix cache (invariant 2), and where its own lineage finds it again.

vLLM files every full block of a request under ``request.block_hashes[i]``. Before it does so, the hashes of all blocks
from the first approximate one on are replaced by keyed ones that only its lineage can compute, so that no other
request finds them. Hashes of blocks that fill up later, while the answer grows, are replaced likewise. Each hidden hash
is made from the exact one of the same block, and the exact ones are chained on beside them: a prompt that is hashed in
one go and an answer that is hashed block by block give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvcomm_integrations.connector.compat import BlockHasher, Request, block_hasher, rehash
from kvcomm_integrations.planning.lineages import Lineage


class HashGuard:
    """Replaces and restores the block hashes of one request.

    Args:
        request: vLLM's request; only its block hashes are touched.
        hash_block: tokens one hash stands for.
        lineage: whose requests may find what is hidden; ``None``: no other request.
    """

    def __init__(self, request: Request, hash_block: int, lineage: Lineage | None = None) -> None:
        self._request = request
        self._hash_block = hash_block
        self._lineage = Lineage() if lineage is None else lineage
        self._first: int | None = None
        self._inherited = False
        self._exact: list[Any] = []
        """Exact hashes of all full blocks, while active."""
        self._original: BlockHasher | None = None

    @property
    def active(self) -> bool:
        """Hashes are replaced at present."""
        return self._first is not None

    @property
    def inherited(self) -> bool:
        """They are replaced from where the lineage's past goes on."""
        return self._inherited

    @property
    def forgotten(self) -> bool:
        """What its lineage has filed is not to be used any more."""
        return self._lineage.forgotten

    @property
    def untouched(self) -> int:
        """Tokens before the first hidden block, while active; 0 otherwise."""
        return (self._first or 0) * self._hash_block

    @property
    def exact_hashes(self) -> list[Any]:
        """The hashes that the request's full blocks have where nothing is hidden."""
        return self._exact if self.active and self._original is not None else self._request.block_hashes

    def take_over(self, cached: Callable[[Sequence[Any]], int]) -> bool:
        """Hide every block after those that are found exactly, if the lineage's past goes on from there.

        Nothing else could reach further: wherever hidden blocks begin, they reach to the first that is not held.

        Args:
            cached: how many blocks of these hashes, from the first on, the prefix cache holds.

        Returns:
            whether it does.
        """
        exact = self._request.block_hashes
        if self.active or not self._lineage.used or self.forgotten or block_hasher(self._request) is None:
            return False
        first = cached(exact)
        if first == len(exact) or not cached([self._lineage.hide(exact[first])]):
            return False
        self._hide(first)
        self._inherited = True
        return True

    def protect(self, first_approximate: int) -> None:
        """Hide every block from the one that holds token ``first_approximate`` on. Idempotent.

        Raises:
            RuntimeError: already active for a later block, a fault of ours.
        """
        first = first_approximate // self._hash_block
        if self._first is None:
            self._hide(first)
        elif self._first > first or (self._first < first and not self._inherited):
            raise RuntimeError(f"block hashes already hidden from block {self._first}, asked for {first}")

    def restore(self) -> None:
        """Undo ``protect`` for a plan that was dropped before vLLM allocated blocks for it."""
        if not self._inherited:
            self._show()

    def disown(self) -> None:
        """Undo ``take_over``, and ``protect`` with it."""
        self._inherited = False
        self._show()

    def _hide(self, first: int) -> None:
        self._first = first
        self._original = block_hasher(self._request)
        if self._original is not None:
            self._exact = list(self._request.block_hashes)
            self._lineage.used = True
            rehash(self._request, first, self._hidden_hashes)

    def _show(self) -> None:
        if self._first is not None and self._original is not None:
            rehash(self._request, self._first, self._original)
        self._first, self._original = None, None

    def _hidden_hashes(self, request: Request) -> list[Any]:
        assert self._original is not None and self._first is not None
        filled, shown = len(request.block_hashes), request.block_hashes
        request.block_hashes = self._exact  # what the exact hashes chain on
        try:
            self._exact += self._original(request)
        finally:
            request.block_hashes = shown
        return [
            self._lineage.hide(value) if number >= self._first else value
            for number, value in enumerate(self._exact[filled:], filled)
        ]
