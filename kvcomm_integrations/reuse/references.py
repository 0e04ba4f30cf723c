"""References held by one worker. The connector's scheduler decides what to keep and what to drop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvcomm_integrations.errors import KVCommError
from kvcomm_integrations.reuse.kv import KV


class StoreFullError(KVCommError, MemoryError):
    """A reference does not fit into the store's budget; nothing was stored."""


@dataclass(frozen=True, eq=False)
class Reference:
    """KV of one segment as it was computed in its source context.

    Args:
        ref_id: its number, given by the scheduler.
        keys: without rotation unless ``rotated``, ``(layers, kv_heads, tokens, head_dim)``.
        values: same shape.
        position: position its first token had in the source prompt.
        source: agent in whose prompt it was computed.
        dense: the source prompt was computed densely, so nothing approximate is in it.
        name: placeholder it was harvested from.
        rotated: keys are as the engine stores them, for an exact copy to the same positions (a prompt's beginning).
    """

    ref_id: int
    keys: torch.Tensor
    values: torch.Tensor
    position: int = 0
    source: str = ""
    dense: bool = True
    name: str = ""
    rotated: bool = False

    def __post_init__(self) -> None:
        if self.keys.ndim != 4 or self.keys.shape[:3] != self.values.shape[:3]:
            raise ValueError(
                f"reference {self.ref_id}: keys {tuple(self.keys.shape)} and values {tuple(self.values.shape)} are not "
                "(layers, kv_heads, tokens, head_dim) of the same tokens"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def kv(self) -> KV:
        """Keys and values as policies take them."""
        return KV(self.keys, self.values)


class ReferenceStore:
    """References by number, within a byte budget.

    Args:
        max_bytes: most bytes of keys and values held at once.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        """Bytes held now."""
        self._references: dict[int, Reference] = {}

    def put(self, reference: Reference) -> None:
        """Store a reference; one with the same number is replaced.

        Raises:
            StoreFullError: it does not fit; the scheduler should have ordered a drop first.
        """
        replaced = self._references.get(reference.ref_id)
        needed = self.nbytes + reference.nbytes - (replaced.nbytes if replaced else 0)
        if needed > self.max_bytes:
            raise StoreFullError(
                f"reference {reference.ref_id} of {reference.nbytes} bytes does not fit: {self.nbytes} of "
                f"{self.max_bytes} bytes are taken; raise store_bytes, or drop references first"
            )
        self._references[reference.ref_id] = reference
        self.nbytes = needed

    def get(self, ref_id: int) -> Reference:
        """The reference with this number.

        Raises:
            KeyError: it was never stored, or dropped.
        """
        try:
            return self._references[ref_id]
        except KeyError:
            raise KeyError(f"reference {ref_id} is not in this worker's store ({len(self)} are)") from None

    def snapshot(self) -> tuple[Reference, ...]:
        """All references held now; may be called from any thread."""
        return tuple(self._references.values())

    def drop(self, ref_id: int) -> bool:
        """Forget a reference; returns whether it was there."""
        reference = self._references.pop(ref_id, None)
        self.nbytes -= reference.nbytes if reference else 0
        return reference is not None

    def clear(self) -> None:
        """Forget all."""
        self._references.clear()
        self.nbytes = 0

    def __contains__(self, ref_id: object) -> bool:
        return ref_id in self._references

    def __len__(self) -> int:
        return len(self._references)

    def __iter__(self) -> Iterator[int]:
        return iter(self._references)
