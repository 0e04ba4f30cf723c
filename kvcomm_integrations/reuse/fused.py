"""Loading in one kernel: gather a reference, correct, rotate, and scatter into the paged cache of an accelerator.

In plain torch the same takes a dozen operations for every few layers and writes the estimate to memory in between. The
kernel is written in Triton, which comes with torch on a GPU and is not needed elsewhere.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from kvcomm_integrations.reuse.affine import Correction
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.rope import Rope

TOKENS = 16
"""Tokens that one program of the kernel writes."""
MAX_RANK = 32
MAX_DIM = 128
"""Up to this rank and head dimension a program keeps all it works on in registers (compiled for sm_80 and sm_90)."""


def available(device: torch.device) -> bool:
    """Whether the kernel can be used on a device: a GPU, and Triton installed.

    Triton's interpreter (``TRITON_INTERPRET=1``) runs it on a CPU, slowly, for tests.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    return importlib.util.find_spec("triton") is not None


class Half(NamedTuple):
    """Where the keys, or the values, of a block are, in elements."""

    base: int
    """Place in the block of the first number."""
    head: int
    """From one head to the next; so are the others."""
    token: int
    channel: int


class BlockForm(NamedTuple):
    """How a layer's cache is divided into blocks, and a block into keys and values."""

    kv_heads: int
    block_size: int
    head_dim: int
    block_stride: int
    """Elements from one block to the next."""
    keys: Half
    values: Half

    @classmethod
    def of(cls, layer: torch.Tensor) -> BlockForm:
        """The form of ``(blocks, kv_heads, block, 2 * head_dim)`` of any strides, keys before values in each row."""
        block, head, token, channel = layer.stride()
        _, kv_heads, block_size, width = layer.shape
        keys = Half(0, head, token, channel)
        return cls(kv_heads, block_size, width // 2, block, keys, keys._replace(base=width // 2 * channel))


class FusedCache:
    """Paged caches of all layers, written by the kernel.

    One launch writes all layers, which it finds in a table of addresses: for short contents a launch costs as much as
    the work itself.

    Args:
        layers: one tensor per layer, all of the same shape, strides and type. They must stay where they are.
        rope: the model's rotation.
        form: where keys and values are; without one that of ``(blocks, kv_heads, block, 2 * head_dim)``.
    """

    def __init__(self, layers: Sequence[torch.Tensor], rope: Rope, form: BlockForm | None = None) -> None:
        self._layers = list(layers)  # keeps the memory that the table points to
        self._rope = rope
        first = self._layers[0]
        if any(
            (layer.shape, layer.stride(), layer.dtype) != (first.shape, first.stride(), first.dtype) for layer in layers
        ):
            raise ValueError("the caches of the layers differ in shape, order or type")
        self.device = first.device
        self.dtype = first.dtype
        self._form = form or BlockForm.of(first)
        self._table = torch.tensor([layer.data_ptr() for layer in self._layers], dtype=torch.int64).to(self.device)

    def takes(self, reference: KV, correction: Correction) -> bool:
        """Whether the kernel can write this estimate: of the cache's type and shape, its map on the cache's device.

        ``reference`` is each ``(layers, kv_heads, tokens, head_dim)``.
        """
        layers, kv_heads, _, dim = reference.keys.shape
        heads, inner, _ = correction.map.down_keys.shape
        return (
            (layers, kv_heads, dim) == (len(self._layers), self._form.kv_heads, self._form.head_dim)
            and heads == (layers - 1) * kv_heads
            and dim <= MAX_DIM
            and 1 < inner <= MAX_RANK + 1
            and all(part.dtype == self.dtype and part.device == self.device for part in reference)
            and all(part.dtype == torch.float32 and part.device == self.device for part in correction.map)
            and all(part.is_contiguous() for part in correction.map)
        )

    def write(
        self, reference: KV, correction: Correction, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Write a content's estimate with rotated keys; does not wait for the GPU.

        Args:
            reference: keys before rotation and values, each ``(layers, kv_heads, tokens, head_dim)``.
            correction: for these tokens; `takes` must have returned ``True``.
            positions: ``(tokens,)``, where the keys are rotated to.
            slots: ``(tokens,)`` int64 on the cache's device, block number times block size plus offset.

        Returns:
            how many of the numbers written are NaN or infinite in the cache's type, ``(1,)`` int32.

        Raises:
            UnsupportedModelError: a position that cannot be rotated to.
        """
        layers, kv_heads, tokens, dim = reference.keys.shape
        not_finite = torch.zeros(1, dtype=torch.int32, device=self.device)
        if tokens == 0:
            return not_finite
        cosines, sines = self._rope.cos_sin(positions)
        pairs, interleaved, affine = self._rope.rotary_dim // 2, self._rope.interleaved, correction.map
        rank, features = affine.down_keys.shape[1] - 1, affine.down_position.shape[2]
        rest = dim - 2 * pairs
        _kernel()[(-(-tokens // TOKENS), kv_heads, layers)](
            reference.keys, *reference.keys.stride(), reference.values, *reference.values.stride(),
            *affine, correction.position.contiguous(), cosines, sines, slots, self._table,
            self._form.block_stride, *self._form.keys, *self._form.values, not_finite,
            float(correction.trust), kv_heads, tokens,
            block=self._form.block_size, dim=dim, rank=rank, features=features,
            pairs=pairs, pair_step=2 if interleaved else 1, pair_distance=1 if interleaved else pairs,
            tokens_tile=TOKENS, rank_tile=_tile(rank), pairs_tile=_tile(pairs), rest_tile=_tile(rest) if rest else 0,
            dim_tile=_tile(dim), precision="ieee" if torch.version.hip else "tf32x3",
        )  # fmt: skip
        return not_finite


@cache
def _kernel() -> Any:
    """The kernel. Triton compiles it on first use for each shape of model, and keeps the result on disk."""
    from kvcomm_integrations.reuse.fused_kernel import place_corrected

    return place_corrected


def _tile(size: int) -> int:
    """The next power of two, at least 16: the smallest side of a matrix product in Triton."""
    return max(16, 1 << (size - 1).bit_length())
