"""Checks of a worker on itself, for tests and for whoever sets up a new machine. Leaves the paged cache as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvcomm_integrations.connector.worker.paged_cache import PagedCache
from kvcomm_integrations.connector.worker.repair import Gap, prepare_repair, repair
from kvcomm_integrations.errors import EngineError
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.references import Reference
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


def repair_error(
    runner: Any, cache: PagedCache, token_ids: Sequence[int], gaps: Sequence[tuple[int, int]], *, joined: bool = False
) -> dict[str, float]:
    """How far the repair pass is from a dense run where all that it attends to is exact.

    Computes the sequence in one piece on the cache's last blocks, overwrites the gaps with noise, repairs them, and
    compares. To be called while no request runs.

    Args:
        runner: the worker's model runner.
        cache: the worker's paged cache.
        token_ids: the sequence.
        gaps: spans ``[start, end)`` of it, in order, not overlapping.
        joined: the last gap is what a step's own forward computes, the others join it.

    Returns:
        largest absolute difference of ``keys``, ``values`` and of the ``hidden`` states of the gaps' tokens (of the
        last gap's, if the others have joined it).

    Raises:
        EngineError: they could not join.
    """
    with _spare_blocks(cache, len(token_ids)) as blocks:
        hidden = repair(runner, cache, [Gap(blocks, 0, tuple(token_ids))])
        dense = cache.read(blocks, 0, len(token_ids))
        missing = _spoiled(cache, blocks, dense, token_ids, gaps)
        mended = _joined(runner, cache, missing) if joined else repair(runner, cache, missing)
        again = cache.read(blocks, 0, len(token_ids))
        places = _positions(gaps)[-len(mended) :]
        return {
            "keys": float((again.keys - dense.keys).abs().max()),
            "values": float((again.values - dense.values).abs().max()),
            "hidden": float((mended - hidden[places]).abs().max()),
        }


def engine_error(
    runner: Any,
    cache: PagedCache,
    rope: Rope,
    computed: Reference,
    token_ids: Sequence[int],
    gaps: Sequence[tuple[int, int]],
) -> float:
    """How far the repair pass is from what vLLM's own forward has computed for the same tokens.

    `repair_error` compares our forward with itself, and cannot see what is wrong with all of its forwards. To be called
    while no request runs.

    Args:
        runner, cache: the worker's model runner and paged cache.
        rope: the model's rotation.
        computed: harvested from a dense request, from a prompt's first token on.
        token_ids: its tokens.
        gaps: spans ``[start, end)`` to repair, in order, not overlapping.

    Returns:
        the norm of the difference by the norm of vLLM's own keys, or values, of the gaps, in the worst layer.
    """
    keys, values = (part.to(cache.device) for part in computed.kv)
    if not computed.rotated:
        keys = rope.rotate(keys, torch.arange(computed.tokens, device=cache.device))
    places = _positions(gaps)
    with _spare_blocks(cache, len(token_ids)) as blocks:
        cache.write(blocks, 0, KV(keys, values))
        repair(runner, cache, _spoiled(cache, blocks, KV(keys, values), token_ids, gaps))
        again = cache.read(blocks, 0, len(token_ids))
    worst = 0.0
    for ours, theirs in zip(again, (keys, values), strict=True):
        wanted = theirs[:, :, places].float().flatten(1)
        difference = ours[:, :, places].float().flatten(1) - wanted
        worst = max(worst, float((difference.norm(dim=1) / wanted.norm(dim=1)).nan_to_num(torch.inf).max()))
    return worst


@contextmanager
def _spare_blocks(cache: PagedCache, tokens: int) -> Iterator[tuple[int, ...]]:
    """The cache's last blocks, with room for so many tokens; they get back what they held."""
    count = -(-tokens // cache.block_size)
    blocks = tuple(range(cache.num_blocks - count, cache.num_blocks))
    saved = cache.read(blocks, 0, count * cache.block_size)
    try:
        yield blocks
    finally:
        cache.write(blocks, 0, saved)


def _spoiled(
    cache: PagedCache, blocks: tuple[int, ...], dense: KV, token_ids: Sequence[int], gaps: Sequence[tuple[int, int]]
) -> list[Gap]:
    """Gaps to repair, once what is there has been overwritten."""
    for start, end in gaps:
        cache.write(blocks, start, KV(*(part[:, :, start:end] * 0 + 7 for part in dense)))
    return [Gap(blocks, start, tuple(token_ids[start:end])) for start, end in gaps]


def _positions(gaps: Sequence[tuple[int, int]]) -> list[int]:
    return [position for start, end in gaps for position in range(start, end)]


def _joined(runner: Any, cache: PagedCache, gaps: Sequence[Gap]) -> torch.Tensor:
    """Compute the last gap as a step would, the others with it; returns the last one's hidden states."""
    step = prepare_repair(runner, cache, gaps[-1:])
    with step.step():
        if not prepare_repair(runner, cache, gaps[:-1]).join(lambda ms: None):
            raise EngineError("the repair pass cannot join a step's forward on this worker")
        return step.forward()
