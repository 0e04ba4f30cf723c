"""Working memory that is kept between loads: fresh memory would have to be mapped page by page for each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from kvcomm_integrations.reuse.kv import KV

CPU_CHUNK_BYTES = 16 << 20
"""Most bytes of estimates made at once on a CPU: they stay in its caches."""
DEVICE_CHUNK_BYTES = 256 << 20
"""The same on an accelerator, which prefers few and large operations."""


class Scratch:
    """Named float32 buffers on one device that grow to the largest size asked for. Not for several threads at once.

    Args:
        device: where the buffers are.
        chunk_bytes: size of the estimate of a few layers, bytes; ``None`` chooses by device. One layer may exceed it.
    """

    def __init__(self, device: torch.device | str = "cpu", chunk_bytes: int | None = None) -> None:
        self.device = torch.device(device)
        default = CPU_CHUNK_BYTES if self.device.type == "cpu" else DEVICE_CHUNK_BYTES
        self.chunk_bytes = default if chunk_bytes is None else chunk_bytes
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A contiguous tensor of this shape in the buffer ``name``, on top of what was taken under that name before."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, device=self.device)
        return buffer[:size].view(shape)

    def estimate(self, layers: int, heads: int, tokens: int, dim: int) -> KV:
        """Room for KV ``(layers, heads, tokens, dim)``, the keys a view of memory ordered channel by channel."""
        keys = self.take("keys", layers, heads, dim, tokens).transpose(2, 3)
        return KV(keys, self.take("values", layers, heads, tokens, dim))

    def chunks(self, shape: torch.Size, first: int = 0) -> Iterator[slice]:
        """Layers from ``first`` on, in slices whose keys and values fit into ``chunk_bytes``.

        Args:
            shape: ``(layers, kv_heads, tokens, head_dim)`` of keys.
            first: first layer.
        """
        layers, heads, tokens, dim = shape
        step = max(1, self.chunk_bytes // max(1, 8 * heads * tokens * dim))
        for start in range(first, layers, step):
            yield slice(start, min(start + step, layers))

    def copies(self, kv: KV, first: int = 0, end: int | None = None) -> Iterator[tuple[slice, KV]]:
        """Layers ``[first, end)`` of KV ``(layers, kv_heads, tokens, head_dim)`` as float32 copies in these buffers.

        They come a few layers at a time, each with the shape of its slice, and each overwrites the one before.
        """
        total, heads, tokens, dim = kv.keys.shape
        for layers in self.chunks(torch.Size((total if end is None else end, heads, tokens, dim)), first):
            room = self.estimate(layers.stop - layers.start, heads, tokens, dim)
            yield layers, KV(room.keys.copy_(kv.keys[layers]), room.values.copy_(kv.values[layers]))
