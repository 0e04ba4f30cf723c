"""Checks of a worker on itself, for tests and for whoever sets up a new machine. Leaves the paged cache as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcomm_integrations.connector.paged import PagedCache
from kvcomm_integrations.connector.repair import Gap, prepare_repair, repair
from kvcomm_integrations.errors import EngineError
from kvcomm_integrations.reuse.policies.base import KV


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
    count = -(-len(token_ids) // cache.block_size)
    blocks = tuple(range(cache.num_blocks - count, cache.num_blocks))
    saved = cache.read(blocks, 0, count * cache.block_size)
    try:
        hidden = repair(runner, cache, [Gap(blocks, 0, tuple(token_ids))])
        dense = cache.read(blocks, 0, len(token_ids))
        for start, end in gaps:
            cache.write(blocks, start, KV(*(part[:, :, start:end] * 0 + 7 for part in dense)))
        missing = [Gap(blocks, s, tuple(token_ids[s:e])) for s, e in gaps]
        mended = _joined(runner, cache, missing) if joined else repair(runner, cache, missing)
        again = cache.read(blocks, 0, len(token_ids))
        places = [position for start, end in gaps for position in range(start, end)][-len(mended) :]
        return {
            "keys": float((again.keys - dense.keys).abs().max()),
            "values": float((again.values - dense.values).abs().max()),
            "hidden": float((mended - hidden[places]).abs().max()),
        }
    finally:
        cache.write(blocks, 0, saved)


def _joined(runner: Any, cache: PagedCache, gaps: Sequence[Gap]) -> torch.Tensor:
    """Compute the last gap as a step would, the others with it; returns the last one's hidden states."""
    step = prepare_repair(runner, cache, gaps[-1:])
    with step.step():
        if not prepare_repair(runner, cache, gaps[:-1]).join(lambda ms: None):
            raise EngineError("the repair pass cannot join a step's forward on this worker")
        return step.forward()
