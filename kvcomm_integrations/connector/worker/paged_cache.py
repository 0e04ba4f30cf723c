"""Reading and writing spans of vLLM's paged KV cache, whatever its layout. Moves tensors and decides nothing.

A layer's cache is ``(blocks, kv_heads, block, 2 * head_dim)``. Two interpretations are known:

* ``GPU``: keys in the first half of the last dimension, values in the second.
* ``CPU``: the block's memory is keys ``(head_dim, block)`` (transposed) followed by values ``(block, head_dim)``.

Which one holds is found out by writing known numbers through vLLM's own operation and reading them back.

On a CPU copies go block by block, each as it lies. A GPU's blocks are small and each operation has a price
there: all tokens of a layer are moved at once, by index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from kvcomm_integrations.errors import UnsupportedModelError
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.transfers import to_device

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
        if len({(layer.shape, layer.stride()) for layer in self._keys}) > 1:
            raise UnsupportedModelError(
                "the KV caches of this model's layers differ in shape or order; run vLLM without the kvcomm connector"
            )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers of this worker."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * self.dtype.itemsize

    def read(
        self, blocks: Sequence[int], start: int, end: int, layers: slice = slice(None), *, as_stored: bool = False
    ) -> KV:
        """Copy tokens ``[start, end)`` of the sequence in ``blocks``; keys come rotated, as vLLM stores them.

        Args:
            blocks: the sequence's block table.
            start, end: tokens.
            layers: layers wanted.
            as_stored: keys keep the cache's order in memory (`keys_by_channel`), which copies faster.

        Returns:
            keys and values, each ``(layers, kv_heads, end - start, head_dim)``, contiguous unless ``as_stored``.
        """
        picked = range(len(self.layers))[layers]
        shape = (len(picked), self.kv_heads, end - start, self.head_dim)
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        if as_stored and self.keys_by_channel:
            keys = values.new_empty(shape[0], shape[1], shape[3], shape[2]).transpose(2, 3)
        else:
            keys = torch.empty_like(values)
        if self.layout is Layout.GPU:
            block, inner = self._at(blocks, start, end)
            for layer, target in zip(picked, zip(keys, values, strict=True), strict=True):
                rows = self.layers[layer][block, :, inner].transpose(0, 1)
                for half, source in zip(target, rows.split(self.head_dim, dim=-1), strict=True):
                    half.copy_(source)
            return KV(keys, values)
        for piece in _pieces(blocks, start, end, self.block_size):
            for span, cached in ((keys, self._keys), (values, self._values)):
                for target, source in zip(
                    piece.of(span), piece.within(cached[picked.start : picked.stop]), strict=True
                ):
                    target.copy_(source)
        return KV(keys, values)

    @property
    def keys_by_channel(self) -> bool:
        """All tokens of one channel of the keys lie side by side inside a block."""
        return self.layout is Layout.CPU

    def write(self, blocks: Sequence[int], start: int, kv: KV, first_layer: int = 0) -> None:
        """Overwrite tokens from ``start`` on with rotated keys and values ``(layers, kv_heads, tokens, head_dim)``.

        Args:
            blocks: the sequence's block table.
            start: first token.
            kv: any float type and order in memory.
            first_layer: the layer that ``kv`` begins with.
        """
        layers = slice(first_layer, first_layer + kv.keys.shape[0])
        if self.layout is Layout.GPU:
            block, inner = self._at(blocks, start, start + kv.keys.shape[2])
            for span, cached in ((kv.keys, self._keys), (kv.values, self._values)):
                for target, source in zip(cached[layers], span, strict=True):
                    target[block, :, inner] = source.transpose(0, 1).to(self.device, self.dtype)
            return
        for piece in _pieces(blocks, start, start + kv.keys.shape[2], self.block_size):
            for span, cached in ((kv.keys, self._keys), (kv.values, self._values)):
                for target, source in zip(piece.within(cached[layers]), piece.of(span), strict=True):
                    target.copy_(source)

    def slots(self, blocks: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
        """Slot numbers ``(tokens,)`` int64 of ``positions`` in the sequence whose block table is ``blocks``."""
        table = torch.tensor(list(blocks), dtype=torch.int64)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    def _at(self, blocks: Sequence[int], start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block number and place in the block of tokens ``[start, end)``, on the cache's device."""
        slots = to_device(self.slots(blocks, torch.arange(start, end)), self.device)
        return slots // self.block_size, slots % self.block_size


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


@dataclass(frozen=True)
class _Piece:
    """Tokens of a span that lie in ``count`` blocks with consecutive numbers, at the same places in each."""

    block: int
    count: int
    inner: slice
    """Tokens inside each block."""
    outer: slice
    """Tokens of the span."""

    def within(self, layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views of each layer's keys or values ``(blocks, kv_heads, block, head_dim)``, all laid out alike.

        One call per view: for short spans making views costs as much as copying.
        """
        first = layers[0][self.block : self.block + self.count, :, self.inner]
        size, stride = first.shape, first.stride()
        offset = first.storage_offset() - layers[0].storage_offset()
        return [torch.as_strided(layer, size, stride, layer.storage_offset() + offset) for layer in layers]

    def of(self, span: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of each layer of a span's keys or values ``(layers, kv_heads, tokens, head_dim)``, as by `within`."""
        return span[:, :, self.outer].unflatten(2, (self.count, -1)).transpose(1, 2).unbind(0)


def _pieces(blocks: Sequence[int], start: int, end: int, size: int) -> list[_Piece]:
    """Cut ``[start, end)`` into as few pieces as can be copied at once."""
    pieces: list[_Piece] = []
    position = start
    while position < end:
        index, offset = divmod(position, size)
        tokens, count = min(size - offset, end - position), 1
        if tokens == size:
            full = (end - position) // size
            while count < full and blocks[index + count] == blocks[index] + count:
                count += 1
        stop = position + tokens * count
        pieces.append(
            _Piece(blocks[index], count, slice(offset, offset + tokens), slice(position - start, stop - start))
        )
        position = stop
    return pieces
