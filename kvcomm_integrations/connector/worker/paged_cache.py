"""Reading and writing spans of vLLM's paged KV cache, whatever its layout. Moves tensors and decides nothing.

Where a layout is a strided view of the memory, as all known ones are, spans are copied through such views. On a CPU
copies go box by box: tokens of one block, or of one of its tiles, or of many whole ones. Layers that lie at equal
distances, as vLLM's do, are copied in one go. A GPU's blocks are small and each operation has a price there: all tokens
of a layer are moved at once, by index.

How a layout is found out is in ``cache_layout.py``, how a span is cut into boxes in ``boxes.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvcomm_integrations.connector.worker.boxes import Grid, cut, strides
from kvcomm_integrations.connector.worker.cache_layout import (
    Digit,
    EngineWrite,
    HalfPacking,
    Layout,
    Packing,
    probe_layout,
    require_alike,
)
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.transfers import to_device

__all__ = ["EngineWrite", "Layout", "Packing", "PagedCache", "probe_layout"]

WIDER = {4: torch.int32, 8: torch.int64}
"""Types, by bytes, in which neighbours that stay together are copied as one number."""


class PagedCache:
    """Span access to the paged cache of all layers of one worker.

    Args:
        layers: each layer's cache, in model order, all alike; `cache_layout.block_shapes` lists the dimensions.
        layout: how keys and values lie inside a block.
    """

    def __init__(self, layers: Sequence[torch.Tensor], layout: Layout | Packing) -> None:
        require_alike(layers)
        self.layers = list(layers)
        self.layout = layout
        self._packing = layout if isinstance(layout, Packing) else Packing.of(self.layers[0], layout)
        _, self.num_blocks, self._block_stride, self.kv_heads, self.block_size, self.head_dim = self._packing.shape
        self.dtype = self.layers[0].dtype
        self.device = self.layers[0].device
        self._runs = _runs(self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers of this worker."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def keys_by_channel(self) -> bool:
        """All tokens of one channel of the keys lie side by side inside a block."""
        halves = self._packing.halves
        return halves is not None and halves[0].tokens == (Digit(self.block_size, 1),)

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
        kv = KV(keys, values)
        halves = self._packing.halves
        if halves is None:
            places = self._places(blocks, start, end)
            for half, where in zip(kv, places, strict=True):
                for target, layer in zip(half, self.layers[layers], strict=True):
                    target.copy_(_memory(layer)[where + layer.storage_offset()])
        elif self._by_index:
            at = [self._at(packing, blocks, start, end) for packing in halves]
            for index, *targets in zip(picked, *kv, strict=True):
                for target, source in zip(targets, self._rows(index, at), strict=True):
                    target.unflatten(-1, source.shape[2:]).copy_(source.transpose(0, 1))
        else:
            for half, packing in zip(kv, halves, strict=True):
                for cached, span in self._pairs(packing, blocks, start, half, picked.start):
                    span.copy_(cached)
        return kv

    def write(self, blocks: Sequence[int], start: int, kv: KV, first_layer: int = 0) -> None:
        """Overwrite tokens from ``start`` on with rotated keys and values ``(layers, kv_heads, tokens, head_dim)``.

        Args:
            blocks: the sequence's block table.
            start: first token.
            kv: any float type and order in memory.
            first_layer: the layer that ``kv`` begins with.
        """
        end = start + kv.keys.shape[2]
        layers = self.layers[first_layer : first_layer + kv.keys.shape[0]]
        halves = self._packing.halves
        if halves is None:
            for half, where in zip(kv, self._places(blocks, start, end), strict=True):
                for source, layer in zip(half, layers, strict=True):
                    _memory(layer)[where + layer.storage_offset()] = source.to(self.device, self.dtype)
        elif self._by_index:
            for half, packing in zip(kv, halves, strict=True):
                at = self._at(packing, blocks, start, end)
                for source, layer in zip(half, layers, strict=True):
                    target = self._view(layer, packing)
                    rows = source.transpose(0, 1).to(self.device, self.dtype)
                    target[at] = rows.unflatten(-1, [digit.size for digit in packing.channels])
        else:
            for half, packing in zip(kv, halves, strict=True):
                # Copies that also convert are fast where rows are long.
                span = half.to(self.dtype) if packing.tiled else half
                for cached, part in self._pairs(packing, blocks, start, span, first_layer):
                    cached.copy_(part)

    def slots(self, blocks: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
        """Slot numbers ``(tokens,)`` int64 of ``positions`` in the sequence whose block table is ``blocks``."""
        table = torch.tensor(list(blocks), dtype=torch.int64)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    # ---- by index: the way of a GPU --------------------------------------------------------------------------------

    @property
    def _by_index(self) -> bool:
        return self.device.type != "cpu" or self.layout is Layout.GPU

    def _at(self, packing: HalfPacking, blocks: Sequence[int], start: int, end: int) -> _Index:
        """Tokens ``[start, end)`` as an index into `_view`, which makes them the first dimension."""
        slots = to_device(self.slots(blocks, torch.arange(start, end)), self.device)
        inner = slots % self.block_size
        digits: list[torch.Tensor] = []
        for size, _ in reversed(packing.tokens):
            digits.insert(0, inner % size)
            inner = inner // size
        return (slots // self.block_size, slice(None), *digits)

    def _view(self, layer: torch.Tensor, packing: HalfPacking, *inner: Digit) -> torch.Tensor:
        """One half of a layer's cache, ``(blocks, kv_heads, *token digits, *inner, *channel digits)``."""
        outer = (Digit(self.num_blocks, self._block_stride), Digit(self.kv_heads, packing.head_stride))
        size, stride = zip(*outer, *packing.tokens, *inner, *packing.channels, strict=True)
        return torch.as_strided(layer, size, stride, layer.storage_offset() + packing.base)

    def _rows(self, index: int, at: Sequence[_Index]) -> tuple[torch.Tensor, ...]:
        """Copies of keys and values of a layer's tokens, each ``(tokens, kv_heads, *channel digits)``."""
        assert self._packing.halves is not None
        layer, (keys, values) = self.layers[index], self._packing.halves
        if keys.base < values.base and replace(keys, base=values.base) == values:  # one operation for both
            both = self._view(layer, keys, Digit(2, values.base - keys.base))
            return both[at[0]].unbind(2)
        return self._view(layer, keys)[at[0]], self._view(layer, values)[at[1]]

    # ---- by offset: where halves are no strided views --------------------------------------------------------------

    def _places(self, blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Offsets of the numbers of tokens ``[start, end)`` in a layer, ``(2, kv_heads, tokens, head_dim)``."""
        slots = self.slots(blocks, torch.arange(start, end))
        inside = self._packing.offsets[:, :, slots % self.block_size]
        return to_device(inside + (slots // self.block_size * self._block_stride)[:, None], self.device)

    # ---- box by box: the way of a CPU ------------------------------------------------------------------------------

    def _pairs(
        self, packing: HalfPacking, blocks: Sequence[int], start: int, span: torch.Tensor, first_layer: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of views, of the cache and of a span of keys or values, that show the same numbers.

        Args:
            packing: how these keys or values lie inside a block.
            blocks: the sequence's block table.
            start: first token.
            span: ``(layers, kv_heads, tokens, head_dim)``.
            first_layer: the layer that the span begins with.
        """
        tokens, channels = ([digit.size for digit in digits] for digits in (packing.tokens, packing.channels))
        layer_stride, head_stride, token_stride, channel_stride = span.stride()
        own = Grid(
            -start * token_stride, head_stride, strides(tokens, token_stride), strides(channels, channel_stride)[1:]
        )
        joinable = self._joinable(span)
        sides, place = (packing.grid(self._block_stride), own), (start, start + span.shape[2])
        boxes = cut(*sides, self.kv_heads, tokens, channels, place, blocks, joinable)
        memory = {joined: _memory(span, joined) for joined in {box.joined for box in boxes}}
        for run in self._runs:
            low, high = max(first_layer, run.first), min(first_layer + span.shape[0], run.stop)
            if low >= high:
                continue
            cached = self.layers[low].storage_offset()
            mine = span.storage_offset() + (low - first_layer) * layer_stride
            for joined, size, at, at_strides, to, to_strides in boxes:
                size = (high - low, *size)
                yield (
                    torch.as_strided(
                        run.memory[joined], size, (run.stride // joined, *at_strides), cached // joined + at
                    ),
                    torch.as_strided(memory[joined], size, (layer_stride // joined, *to_strides), mine // joined + to),
                )

    def _joinable(self, span: torch.Tensor) -> list[int]:
        """How many neighbours can be copied as one number, going by where layers begin, here and in a span."""
        if span.dtype != self.dtype:
            return []
        aligned = math.gcd(span.storage_offset(), span.stride(0), *(layer.storage_offset() for layer in self.layers))
        return [joined for joined in _joints(self.dtype) if aligned % joined == 0]


_Index = tuple[torch.Tensor | slice, ...]


@dataclass(frozen=True)
class _Run:
    """Layers ``[first, stop)`` at equal distances in one piece of memory."""

    first: int
    stop: int
    stride: int
    memory: dict[int, torch.Tensor]
    """All of it, as numbers of so many neighbours each."""


def _runs(layers: Sequence[torch.Tensor]) -> list[_Run]:
    """Divide all layers into as few runs as can be."""
    runs: list[_Run] = []
    for index, layer in enumerate(layers):
        if runs:
            run, before = runs[-1], layers[index - 1]
            distance = layer.storage_offset() - before.storage_offset()
            together = layer.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
            if together and distance > 0 and (run.first == index - 1 or distance == run.stride):
                runs[-1] = replace(run, stop=index + 1, stride=distance)
                continue
        memory = {joined: _memory(layer, joined) for joined in (1, *_joints(layer.dtype))}
        runs.append(_Run(index, index + 1, layer.numel(), memory))
    return runs


def _joints(dtype: torch.dtype) -> list[int]:
    """How many neighbours can be one number of an integer type."""
    return [size // dtype.itemsize for size in WIDER if size > dtype.itemsize]


def _memory(tensor: torch.Tensor, joined: int = 1) -> torch.Tensor:
    """All of the memory that a tensor is a view of, as numbers of ``joined`` neighbours each, ``(numbers,)``."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    flat = torch.as_strided(tensor, (count // joined * joined,), (1,), 0)
    return flat if joined == 1 else flat.view(WIDER[joined * tensor.itemsize])
