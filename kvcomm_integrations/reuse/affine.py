"""A solved map from references to corrections, and its application: a few thin matrix products per layer and head.

It works channel by channel for keys and token by token for values, which is how engines on a CPU cache them, and a few
layers at a time, so that what one product writes is still near when the next one reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.scratch import Scratch


class AffineMap(NamedTuple):
    """``hidden = down @ [K | V | position | 1]`` of a token, then ``[K | V] + up @ hidden``, for every layer from 1 on.

    The last of the ``r + 1`` hidden channels is constantly 1 and carries the mean correction. ``heads`` are all KV
    heads of all layers from 1 on. All parts are float32 and contiguous.
    """

    down_keys: torch.Tensor
    """``(heads, r + 1, head_dim)``."""
    down_values: torch.Tensor
    """``(heads, r + 1, head_dim)``."""
    down_position: torch.Tensor
    """``(heads, r + 1, features + 1)``."""
    up_keys: torch.Tensor
    """``(heads, head_dim, r + 1)``."""
    up_values: torch.Tensor
    """``(heads, r + 1, head_dim)``."""


@dataclass(frozen=True, eq=False)
class Correction:
    """A map, and what it needs to know of one content beside its KV.

    Args:
        map: the map.
        position: features of the tokens' positions and a row of ones, ``(features + 1, tokens)``, float32.
        trust: factor on all but the mean correction.
    """

    map: AffineMap
    position: torch.Tensor
    trust: float

    def estimates(self, reference: KV, scratch: Scratch) -> Iterator[tuple[slice, KV]]:
        """The estimate, a few layers at a time; layer 0 as it is.

        Args:
            reference: keys before rotation and values, each ``(layers, kv_heads, tokens, head_dim)``.
            scratch: where estimates are made.

        Yields:
            layers, and their estimate in float32, each ``(layers, kv_heads, tokens, head_dim)``, the keys a view of
            memory ordered channel by channel. The caller may write to it; the next estimate overwrites it.
        """
        yield from scratch.copies(reference, 0, 1)
        _, kv_heads, tokens, dim = reference.keys.shape
        down_keys, down_values, down_position, up_keys, up_values = self.map
        inner = down_keys.shape[1]
        for layers in scratch.chunks(reference.keys.shape, 1):
            count = layers.stop - layers.start
            heads = slice((layers.start - 1) * kv_heads, (layers.stop - 1) * kv_heads)
            batch = count * kv_heads
            keys = _floats("keys_in", reference.keys[layers], scratch).reshape(batch, tokens, dim).mT
            values = _floats("values_in", reference.values[layers], scratch).reshape(batch, tokens, dim)
            hidden = scratch.take("hidden", batch, inner, tokens)
            torch.mm(down_position[heads].flatten(0, 1), self.position, out=hidden.view(-1, tokens))
            hidden.baddbmm_(down_keys[heads], keys)
            hidden.baddbmm_(down_values[heads], values.mT)
            if self.trust != 1:
                hidden[:, :-1] *= self.trust
            out = scratch.estimate(count, kv_heads, tokens, dim)
            torch.baddbmm(keys, up_keys[heads], hidden, out=out.keys.mT.view(batch, dim, tokens))
            torch.baddbmm(values, hidden.mT, up_values[heads], out=out.values.view(batch, tokens, dim))
            yield layers, out


def _floats(name: str, part: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """``part`` ``(layers, kv_heads, tokens, head_dim)`` itself if it is float32, else a float32 copy in ``scratch``."""
    return part if part.dtype == torch.float32 else scratch.take(name, *part.shape).copy_(part)
