"""Keys and values of a span of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch


class KV(NamedTuple):
    """Keys (pre-RoPE) and values of a span, each ``(layers, kv_heads, tokens, head_dim)``."""

    keys: torch.Tensor
    values: torch.Tensor


def is_finite(kv: KV) -> bool:
    """Whether keys and values hold no NaN and no infinity."""
    return bool(torch.isfinite(checksum(kv)))


def checksum(kv: KV) -> torch.Tensor:
    """The sum of keys and values, a float32 scalar: NaN or infinite if one of them is. Cheaper than checking each."""
    return kv.keys.sum(dtype=torch.float32) + kv.values.sum(dtype=torch.float32)
