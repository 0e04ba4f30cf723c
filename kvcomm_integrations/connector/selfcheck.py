"""Invariant 3 on real keys: equal tokens have equal layer-0 keys once the rotation is undone.

It needs no model-specific code, and finds out a rotary embedding that is not the one the configuration names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcomm_integrations.connector.paged import PagedCache
from kvcomm_integrations.reuse.rope import Rope

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of re-rotated layer-0 keys, relative to their largest value, by cache dtype."""


def check_rotation(cache: PagedCache, rope: Rope, blocks: Sequence[int], token_ids: Sequence[int]) -> str | None:
    """Compare the keys of tokens that occur more than once in a sequence.

    Args:
        cache: the worker's paged cache.
        rope: the rotation to be checked.
        blocks: the sequence's block table.
        token_ids: the sequence's first tokens, all computed.

    Returns:
        what is wrong; empty if nothing is; ``None`` if no token occurs twice.
    """
    seen: dict[int, list[int]] = {}
    for position, token in enumerate(token_ids):
        seen.setdefault(token, []).append(position)
    pairs = [(places[0], places[-1]) for places in seen.values() if places[-1] - places[0] >= 2]
    if not pairs:
        return None
    keys = cache.read(blocks, 0, len(token_ids), slice(0, 1)).keys
    plain = rope.unrotate(keys, torch.arange(len(token_ids), device=cache.device)).float()
    first = plain[:, :, [a for a, _ in pairs]]
    second = plain[:, :, [b for _, b in pairs]]
    worst = float((first - second).abs().max() / plain.abs().max().clamp_min(1e-12))
    if not worst <= TOLERANCE.get(cache.dtype, 1e-1):
        return (
            f"the rotation self-check failed (relative difference {worst:.3g} between keys of equal tokens): "
            "this model's rotary embedding is not the one its configuration names"
        )
    return ""
