"""Reading and writing spans of vLLM's paged KV cache, whatever its layout. Moves tensors and decides nothing.

A layer's cache is ``(blocks, kv_heads, block, 2 * head_dim)``. Two interpretations are known:

* ``GPU``: keys in the first half of the last dimension, values in the second.
* ``CPU``: the block's memory is keys ``(head_dim, block)`` (transposed) followed by values ``(block, head_dim)``.

Which one holds is found out by writing known numbers through vLLM's own operation and reading them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import torch

from kvcomm_integrations.errors import UnsupportedModelError
from kvcomm_integrations.reuse.policies.base import KV

EngineWrite = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``(layer index, keys (tokens, kv_heads, head_dim), values, slots (tokens,))``: vLLM's own cache write."""


class Layout(StrEnum):
    """How keys and values lie inside a block."""

    CPU = "cpu"
    GPU = "gpu"


class PagedCache:
    """Span access to the paged cache of all layers of one worker.

    Args:
        layers: one ``(blocks, kv_heads, block, 2 * head_dim)`` tensor per layer, in model order.
        layout: how keys and values lie inside a block.
    """

    def __init__(self, layers: Sequence[torch.Tensor], layout: Layout) -> None:
        self.layers = list(layers)
        self.layout = layout
        self.num_blocks, self.kv_heads, self.block_size, width = self.layers[0].shape
        self.head_dim = width // 2
        self.dtype = self.layers[0].dtype
        self.device = self.layers[0].device
        self._keys, self._values = zip(*(_views(layer, layout) for layer in self.layers), strict=True)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers of this worker."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * self.dtype.itemsize

    def read(self, blocks: Sequence[int], start: int, end: int, layers: slice = slice(None)) -> KV:
        """Copy tokens ``[start, end)`` of the sequence in ``blocks``; keys come rotated, as vLLM stores them.

        Returns:
            keys and values, each ``(layers, kv_heads, end - start, head_dim)``, contiguous.
        """
        picked = range(len(self.layers))[layers]
        shape = (len(picked), self.kv_heads, end - start, self.head_dim)
        keys = torch.empty(shape, dtype=self.dtype, device=self.device)
        values = torch.empty_like(keys)
        for block, inner, outer in _pieces(blocks, start, end, self.block_size):
            for row, layer in enumerate(picked):
                keys[row, :, outer] = self._keys[layer][block, :, inner]
                values[row, :, outer] = self._values[layer][block, :, inner]
        return KV(keys, values)

    def write(self, blocks: Sequence[int], start: int, kv: KV) -> None:
        """Overwrite tokens from ``start`` on with rotated keys and values ``(layers, kv_heads, tokens, head_dim)``."""
        for block, inner, outer in _pieces(blocks, start, start + kv.keys.shape[2], self.block_size):
            for layer in range(len(self.layers)):
                self._keys[layer][block, :, inner] = kv.keys[layer, :, outer]
                self._values[layer][block, :, inner] = kv.values[layer, :, outer]

    def slots(self, blocks: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
        """Slot numbers ``(tokens,)`` int64 of ``positions`` in the sequence whose block table is ``blocks``."""
        table = torch.tensor(list(blocks), dtype=torch.int64)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size


def probe_layout(layers: Sequence[torch.Tensor], engine_write: EngineWrite) -> Layout:
    """Find out how vLLM stores KV by writing numbers through its own operation and reading them back.

    Uses the cache's last block and leaves it zeroed; call it before any request is served.

    Raises:
        UnsupportedModelError: the numbers come back in no known arrangement.
    """
    first = layers[0]
    if first.dim() != 4 or first.shape[-1] % 2:
        raise UnsupportedModelError(
            f"KV-cache layout {tuple(first.shape)} is not known; run vLLM without the kvcomm connector, or "
            "choose another attention backend"
        )
    num_blocks, kv_heads, block_size, width = first.shape
    tokens = block_size - 1
    generator = torch.Generator().manual_seed(0)
    shape = (tokens, kv_heads, width // 2)
    keys = torch.randn(shape, generator=generator).to(first.dtype).to(first.device)
    values = torch.randn(shape, generator=generator).to(first.dtype).to(first.device)
    slots = (num_blocks - 1) * block_size + torch.arange(tokens, dtype=torch.int64, device=first.device)
    found: set[Layout] = set()
    for index in {0, len(layers) - 1}:
        engine_write(index, keys, values, slots)
        matching = set()
        for layout in Layout:
            got = PagedCache([layers[index]], layout).read([num_blocks - 1], 0, tokens)
            if torch.equal(got.keys[0].transpose(0, 1), keys) and torch.equal(got.values[0].transpose(0, 1), values):
                matching.add(layout)
        layers[index][num_blocks - 1].zero_()
        found = matching if not found else found & matching
        if not found:
            raise UnsupportedModelError(
                f"KV cache of dtype {first.dtype}, shape {tuple(first.shape)} is packed in an unknown way (AMX?); "
                "use dtype float32 on this CPU, or run vLLM without the kvcomm connector"
            )
    return next(iter(found))


def _views(layer: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value views of a layer's cache, each ``(blocks, kv_heads, block, head_dim)``, sharing its memory."""
    blocks, heads, block, width = layer.shape
    dim = width // 2
    if layout is Layout.GPU:
        return layer[..., :dim], layer[..., dim:]
    halves = layer.view(blocks, heads, 2, block * dim)
    keys = halves[:, :, 0].view(blocks, heads, dim, block).transpose(2, 3)
    return keys, halves[:, :, 1].view(blocks, heads, block, dim)


def _pieces(blocks: Sequence[int], start: int, end: int, size: int) -> list[tuple[int, slice, slice]]:
    """Cut ``[start, end)`` at block borders: (block number, tokens inside the block, tokens of the span)."""
    pieces = []
    position = start
    while position < end:
        offset = position % size
        count = min(size - offset, end - position)
        pieces.append(
            (
                blocks[position // size],
                slice(offset, offset + count),
                slice(position - start, position - start + count),
            )
        )
        position += count
    return pieces
