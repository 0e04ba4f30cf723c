"""Keeping approximate KV out of the exact prefix cache (invariant 2).

vLLM files every full block of a request under ``request.block_hashes[i]``. Before it does so, the hashes of all blocks
from the first approximate one on are replaced by a keyed hash that only this request can compute, so that no other
request finds them. Hashes of blocks that fill up later, while the answer grows, are replaced and chained likewise.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import Any

from kvcomm_integrations.connector.compat import BlockHasher, Request, block_hasher, rehash


class HashGuard:
    """Replaces and restores the block hashes of one request.

    Args:
        request: vLLM's request; only its block hashes are touched.
        hash_block: tokens one hash stands for.
    """

    def __init__(self, request: Request, hash_block: int) -> None:
        self._request = request
        self._hash_block = hash_block
        self._secret = os.urandom(16)
        self._first: int | None = None
        self._original: BlockHasher | None = None

    @property
    def active(self) -> bool:
        """Hashes are replaced at present."""
        return self._first is not None

    @property
    def untouched(self) -> int:
        """Tokens before the first hidden block, while active; 0 otherwise."""
        return (self._first or 0) * self._hash_block

    def protect(self, first_approximate: int) -> None:
        """Hide every block from the one that holds token ``first_approximate`` on. Idempotent.

        Raises:
            RuntimeError: already active for another block, a fault of ours.
        """
        first = first_approximate // self._hash_block
        if self._first is not None:
            if self._first != first:
                raise RuntimeError(f"block hashes already hidden from block {self._first}, asked for {first}")
            return
        self._first = first
        self._original = block_hasher(self._request)
        if self._original is not None:
            rehash(self._request, first, self._hidden_hashes)

    def restore(self) -> None:
        """Undo ``protect`` for a plan that was dropped before vLLM allocated blocks for it."""
        if self._first is None:
            return
        if self._original is not None:
            rehash(self._request, self._first, self._original)
        self._first, self._original = None, None

    def _hidden_hashes(self, request: Request) -> list[Any]:
        assert self._original is not None and self._first is not None
        filled = len(request.block_hashes)
        return [
            blake2b(bytes(value), key=self._secret, digest_size=32).digest() if filled + i >= self._first else value
            for i, value in enumerate(self._original(request))
        ]
