"""A solved map from references to corrections, and its application: a few thin matrix products per layer and head.

It works channel by channel for keys and token by token for values, which is how engines on a CPU cache them, and a few
layers at a time, so that what one product writes is still near when the next one reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.scratch import Scratch


@dataclass(eq=False)
class AffineMap:
    """``hidden = down @ [K | V | position | 1]`` of a token, then ``[K | V] + up @ hidden``, for every layer from 1 on.

    The last of the ``r + 1`` hidden channels is constantly 1 and carries the mean correction. ``heads`` below are all
    KV heads of all layers from 1 on.

    Args:
        down_keys: ``(heads, r + 1, head_dim)``; ``down_values`` likewise.
        down_position: ``(heads, r + 1, features + 1)``.
        up_keys: ``(heads, head_dim, r + 1)``.
        up_values: ``(heads, r + 1, head_dim)``.
    """

    down_keys: torch.Tensor
    down_values: torch.Tensor
    down_position: torch.Tensor
    up_keys: torch.Tensor
    up_values: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """All five, in this order."""
        return self.down_keys, self.down_values, self.down_position, self.up_keys, self.up_values

    @property
    def nbytes(self) -> int:
        """Bytes of all five."""
        return sum(part.nbytes for part in self.parts)

    def estimates(
        self, reference: KV, position: torch.Tensor, trust: float, scratch: Scratch
    ) -> Iterator[tuple[slice, KV]]:
        """The estimate, a few layers at a time and layer 0 as it is.

        Args:
            reference: keys before rotation and values, ``(layers, kv_heads, tokens, head_dim)``.
            position: features of the tokens' positions and a row of ones, ``(features + 1, tokens)``.
            trust: factor on all but the mean correction.
            scratch: where estimates are made.

        Yields:
            layers and their estimate in float32, keys as a view of memory ordered channel by channel. It may be
            overwritten, and will be by the next.
        """
        yield from scratch.copies(reference, 0, 1)
        _, kv_heads, tokens, dim = reference.keys.shape
        inner = self.down_keys.shape[1]
        for layers in scratch.chunks(reference.keys.shape, 1):
            count = layers.stop - layers.start
            heads = slice((layers.start - 1) * kv_heads, (layers.stop - 1) * kv_heads)
            batch = count * kv_heads
            keys = _floats("keys_in", reference.keys[layers], scratch).reshape(batch, tokens, dim).mT
            values = _floats("values_in", reference.values[layers], scratch).reshape(batch, tokens, dim)
            hidden = scratch.take("hidden", batch, inner, tokens)
            torch.mm(self.down_position[heads].flatten(0, 1), position, out=hidden.view(-1, tokens))
            hidden.baddbmm_(self.down_keys[heads], keys)
            hidden.baddbmm_(self.down_values[heads], values.mT)
            if trust != 1:
                hidden[:, :-1] *= trust
            out = KV(scratch.keys(count, kv_heads, tokens, dim), scratch.values(count, kv_heads, tokens, dim))
            torch.baddbmm(keys, self.up_keys[heads], hidden, out=out.keys.view(batch, dim, tokens))
            torch.baddbmm(values, hidden.mT, self.up_values[heads], out=out.values.view(batch, tokens, dim))
            yield layers, KV(out.keys.transpose(2, 3), out.values)


@dataclass(frozen=True, eq=False)
class Correction:
    """A map, and what it is given of the tokens of one content beside their KV.

    Args:
        map: the map.
        position: features of the tokens' positions and a row of ones, ``(features + 1, tokens)``.
        trust: factor on all but the mean correction.
    """

    map: AffineMap
    position: torch.Tensor
    trust: float

    def estimates(self, reference: KV, scratch: Scratch) -> Iterator[tuple[slice, KV]]:
        """See `AffineMap.estimates`."""
        return self.map.estimates(reference, self.position, self.trust, scratch)


def _floats(name: str, part: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """The same numbers in float32, where they are if they are so already."""
    return part if part.dtype == torch.float32 else scratch.take(name, *part.shape).copy_(part)
