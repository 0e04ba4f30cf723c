"""Small KV tensors for the tests of this folder."""

import torch

from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.kv import KV

EDGE = Edge("planner", "coder", "user_question")


def random_kv(tokens: int, layers: int = 3, heads: int = 2, dim: int = 4, dtype: torch.dtype = torch.float32) -> KV:
    shape = (layers, heads, tokens, dim)
    return KV(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))


def drifted(reference: KV, size: float = 0.3) -> KV:
    """A truth near a reference: layer 0 is equal, the others are scaled, moved and disturbed a little."""
    keys, values = (part + size * (1 - 0.5 * part + 0.1 * torch.randn_like(part)) for part in reference)
    keys[0], values[0] = reference.keys[0], reference.values[0]
    return KV(keys, values)


def largest_difference(a: KV, b: KV) -> float:
    return max(float((x.float() - y.float()).abs().max()) for x, y in zip(a, b, strict=True))
