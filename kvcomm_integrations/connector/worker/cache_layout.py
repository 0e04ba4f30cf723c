"""How keys and values lie inside a block of vLLM's paged cache, found out by probing. Moves no request's tensors.

An engine packs a block as its kernels like it: token after token, keys transposed, tiles for a matrix unit. The probe
writes numbers that say which token, head and channel they belong to through the engine's own operation, reads the
block's memory, and so learns where each number is. Any arrangement will do in which every number of a block stays in
that block, as it was written, always at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import NamedTuple

import torch

from kvcomm_integrations.connector.worker.boxes import Grid
from kvcomm_integrations.errors import UnsupportedModelError

EngineWrite = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``(layer index, keys (tokens, kv_heads, head_dim), values, slots (tokens,))``: vLLM's own cache write."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Caches that keep keys and values as they are."""
BASE = 255
"""Numbers are written in digits of this base, each one more than it is: exact in every dtype, and never zero."""
REMEDY = "run vLLM without the kvcomm connector"


class Layout(StrEnum):
    """The arrangements that have a name, of ``(blocks, kv_heads, block, 2 * head_dim)`` tensors."""

    CPU = "cpu"
    """A block's memory is, head by head, keys ``(head_dim, block)`` (transposed), then values ``(block, head_dim)``."""
    GPU = "gpu"
    """Keys in the first half of the last dimension, values in the second."""


class Digit(NamedTuple):
    """One of the numbers that an index is divided into, such as the tile of a token and its place in the tile."""

    size: int
    stride: int
    """Elements from one to the next."""


class BlockShape(NamedTuple):
    """What a layer's cache holds, and where its blocks are."""

    block_dim: int
    """The dimension of the tensor that counts the blocks."""
    blocks: int
    block_stride: int
    """Elements from one block to the next."""
    kv_heads: int
    block_size: int
    head_dim: int


@dataclass(frozen=True)
class HalfPacking:
    """Where the keys, or the values, of a block are: a strided view of its memory.

    Digits are ordered from the one that counts most to the one that counts least.
    """

    base: int
    """Element of the block that the first number is at."""
    head_stride: int
    tokens: tuple[Digit, ...]
    channels: tuple[Digit, ...]

    def offsets(self, heads: int) -> torch.Tensor:
        """Where in the block each number is, ``(kv_heads, block, head_dim)`` int64."""
        head = torch.arange(heads) * self.head_stride
        return self.base + head[:, None, None] + _values(self.tokens)[:, None] + _values(self.channels)

    def grid(self, block_stride: int) -> Grid:
        """Where the numbers of a layer are, its blocks so far apart."""
        tokens, channels = (tuple(digit.stride for digit in digits) for digits in (self.tokens, self.channels))
        return Grid(self.base, self.head_stride, (block_stride, *tokens), channels)

    @property
    def tiled(self) -> bool:
        """Tokens or channels are divided into tiles."""
        return len(self.tokens) + len(self.channels) > 2

    def __str__(self) -> str:
        tokens, channels = ("x".join(str(digit.size) for digit in digits) for digits in (self.tokens, self.channels))
        return f"{tokens} tokens of {channels} channels"


@dataclass(frozen=True, eq=False)
class Packing:
    """How keys and values lie inside a block, whatever the arrangement."""

    shape: BlockShape
    halves: tuple[HalfPacking, HalfPacking] | None
    """Keys and values as strided views; ``None`` where they are not."""
    offsets: torch.Tensor
    """Where in the block each number is, ``(2, kv_heads, block, head_dim)`` int64."""

    @classmethod
    def from_offsets(cls, shape: BlockShape, offsets: torch.Tensor) -> Packing:
        """The packing in which each number is where ``offsets`` ``(2, kv_heads, block, head_dim)`` says."""
        keys, values = (_strided(half) for half in offsets)
        return cls(shape, None if keys is None or values is None else (keys, values), offsets)

    @classmethod
    def of(cls, layer: torch.Tensor, layout: Layout) -> Packing:
        """A named arrangement of this layer's cache."""
        shape = block_shapes(layer)[0]
        _, head, token, channel = layer.stride()
        size, dim = shape.block_size, shape.head_dim
        rows, columns = (Digit(size, token),), (Digit(dim, channel),)
        halves = HalfPacking(0, head, rows, columns), HalfPacking(dim * channel, head, rows, columns)
        if layout is Layout.CPU:
            halves = (
                HalfPacking(0, head, (Digit(size, 1),), (Digit(dim, size),)),
                HalfPacking(size * dim, head, (Digit(size, dim),), (Digit(dim, 1),)),
            )
        return cls(shape, halves, torch.stack([half.offsets(shape.kv_heads) for half in halves]))

    @property
    def value(self) -> str:
        """In words, as the name of a named one."""
        return "keys {}, values {}".format(*self.halves) if self.halves else "scattered"


def block_shapes(layer: torch.Tensor) -> list[BlockShape]:
    """What a layer's cache may hold, going by its dimensions; two answers where they leave it open.

    Known are ``(blocks, kv_heads, block, 2 * head_dim)``, ``(blocks, 2, block, kv_heads, head_dim)`` and
    ``(2, blocks, block, kv_heads, head_dim)``, of any strides.

    Raises:
        UnsupportedModelError: it has other dimensions.
    """
    sizes = layer.shape
    if layer.dim() == 4 and sizes[3] % 2 == 0:
        return [BlockShape(0, sizes[0], layer.stride(0), sizes[1], sizes[2], sizes[3] // 2)]
    if layer.dim() == 5 and 2 in sizes[:2]:
        dims = [dim for dim in (0, 1) if sizes[1 - dim] == 2]
        return [BlockShape(dim, sizes[dim], layer.stride(dim), sizes[3], sizes[2], sizes[4]) for dim in dims]
    raise UnsupportedModelError(
        f"KV-cache layout {tuple(sizes)} is not known; {REMEDY}, or choose another attention backend"
    )


def require_alike(layers: Sequence[torch.Tensor]) -> None:
    """Refuse layers whose caches differ in shape, order or type.

    Raises:
        UnsupportedModelError: they do.
    """
    if len({(tuple(layer.shape), layer.stride(), layer.dtype) for layer in layers}) > 1:
        raise UnsupportedModelError(f"the KV caches of this model's layers differ in shape or order; {REMEDY}")


def probe_layout(layers: Sequence[torch.Tensor], engine_write: EngineWrite) -> Layout | Packing:
    """Find out how vLLM stores KV by writing numbers through its own operation and reading the memory.

    Uses two blocks of the first and of the last layer and leaves them zeroed; call it before any request is served.

    Args:
        layers: each layer's cache, of shape ``(blocks, kv_heads, block, 2 * head_dim)`` or another that is known.
        engine_write: vLLM's operation.

    Returns:
        a name, or where everything is if the arrangement has none.

    Raises:
        UnsupportedModelError: keys and values are not kept as they are, or not always at the same place of a block.
    """
    require_alike(layers)
    first = layers[0]
    for shape in block_shapes(first):
        packing = _probe(layers, shape, engine_write) if first.dtype in DTYPES else None
        if packing is None:
            continue
        for layout in Layout:
            if first.dim() == 4 and torch.equal(Packing.of(first, layout).offsets, packing.offsets):
                return layout
        return packing
    raise UnsupportedModelError(
        f"KV cache of dtype {first.dtype}, shape {tuple(first.shape)} is packed in an unknown way: what is written "
        f"does not lie unchanged at a fixed place of its block; use a KV cache that is not quantised, or {REMEDY}"
    )


def _probe(layers: Sequence[torch.Tensor], shape: BlockShape, engine_write: EngineWrite) -> Packing | None:
    """The packing that all probed blocks of all probed layers have; ``None`` if there is none."""
    found: torch.Tensor | None = None
    probed = sorted({0, len(layers) - 1}), sorted({shape.blocks - 1, shape.blocks // 2})
    for index, block in product(*probed):
        offsets = _Probe(layers[index], shape, block, lambda *kv, i=index: engine_write(i, *kv)).offsets()
        if offsets is None or (found is not None and not torch.equal(offsets, found)):
            return None
        found = offsets
    return None if found is None else Packing.from_offsets(shape, found)


class _Probe:
    """One block of one layer, written and read.

    Args:
        layer: the layer's cache.
        shape: what it holds.
        block: the block's number.
        write: the engine's operation on this layer, called with keys, values and slots.
    """

    def __init__(
        self,
        layer: torch.Tensor,
        shape: BlockShape,
        block: int,
        write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
    ) -> None:
        self._shape, self._write = shape, write
        self._memory = layer.select(shape.block_dim, block)
        self._slots = block * shape.block_size + torch.arange(shape.block_size, device=layer.device)

    def offsets(self) -> torch.Tensor | None:
        """Where in the block each number is, ``(2, kv_heads, block, head_dim)``; ``None`` if the block does not say."""
        size, heads, dim = self._shape.block_size, self._shape.kv_heads, self._shape.head_dim
        numbers = torch.arange(2 * size * heads * dim).view(2, size, heads, dim)
        found = torch.zeros(numbers.numel(), dtype=torch.int64)
        scale = 1
        while scale < numbers.numel():
            digits = self._digits(numbers // scale % BASE, singly=scale == 1)
            if digits is None:
                return None
            found += digits * scale
            scale *= BASE
        places = found.argsort()
        if not torch.equal(found[places], numbers.flatten()):
            return None
        sizes, strides = self._memory.shape, self._memory.stride()
        memory = torch.zeros((), dtype=torch.int64)
        for count, stride in zip(sizes, strides, strict=True):
            memory = memory[..., None] + torch.arange(count) * stride
        return memory.flatten()[places].view(numbers.shape).transpose(1, 2).contiguous()

    def _digits(self, digits: torch.Tensor, *, singly: bool) -> torch.Tensor | None:
        """What the block's memory holds, in the order of its tensor, after these digits were written.

        They are written all at once and then again, part by part: each other token first, so that a write that disturbs
        its neighbours is found out.

        Args:
            digits: ``(2, block, kv_heads, head_dim)``.
            singly: the second time token by token, as decoding does; otherwise the odd ones first.
        """
        keys, values = (digits + 1).to(self._memory.device, self._memory.dtype)
        even, odd = (torch.arange(first, len(keys), 2, device=keys.device) for first in (0, 1))
        parts = [*even.split(1), *odd.split(1)] if singly else [odd, even]
        try:
            self._memory.zero_()
            self._write(keys, values, self._slots)
            whole = self._memory.to("cpu", torch.float32, copy=True)
            self._memory.zero_()
            for part in parts:
                self._write(keys[part], values[part], self._slots[part])
            again = self._memory.to("cpu", torch.float32, copy=True)
        finally:
            self._memory.zero_()
        got = whole.flatten().nan_to_num().long()
        exact = torch.equal(again, whole) and torch.equal(got.float(), whole.flatten())
        return got - 1 if exact and int(got.min()) > 0 and int(got.max()) <= BASE else None


def _strided(offsets: torch.Tensor) -> HalfPacking | None:
    """The strided view that these offsets ``(kv_heads, block, head_dim)`` are; ``None`` if they are none."""
    heads = offsets.shape[0]
    base = int(offsets[0, 0, 0])
    tokens, channels = _digits_of(offsets[0, :, 0] - base), _digits_of(offsets[0, 0] - base)
    head_stride = int(offsets[1, 0, 0]) - base if heads > 1 else int(offsets.max()) + 1
    if tokens is None or channels is None or head_stride <= 0:
        return None
    half = HalfPacking(base, head_stride, tokens, channels)
    return half if torch.equal(half.offsets(heads), offsets) else None


def _digits_of(offsets: torch.Tensor) -> tuple[Digit, ...] | None:
    """The fewest digits whose strides add up to these offsets, which begin with 0; ``None`` if there are none."""
    digits: list[Digit] = []
    while len(offsets) > 1:
        stride = int(offsets[1])
        steady = offsets == torch.arange(len(offsets)) * stride
        size = int(steady.long().cumprod(0).sum())
        if stride <= 0 or len(offsets) % size:
            return None
        digits.insert(0, Digit(size, stride))
        offsets = offsets[::size]
    return tuple(digits) or (Digit(1, 1),)


def _values(digits: Sequence[Digit]) -> torch.Tensor:
    """The offset of each index, ``(indices,)``."""
    offsets = torch.zeros(1, dtype=torch.int64)
    for size, stride in digits:
        offsets = (offsets[:, None] + torch.arange(size) * stride).flatten()
    return offsets
