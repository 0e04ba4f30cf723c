"""The repair pass: one extra forward over scattered tokens of several requests, attending over the KV that is there.

Each gap ``[start, end)`` becomes a row of its own: query length ``end - start``, sequence length ``end``, the request's
own block table. Every layer writes the new KV of all rows before it attends, so later gaps see earlier ones. Where the
known KV is exact, so is the result, bit for bit; rows of a single token take the engine's decoding kernel and agree to
its rounding.

On a CPU the step's own forward takes the gaps along as further rows (see ``VirtualBatch.join``): all weights are read
once instead of twice. Its kernel divides the work by the whole batch, so results agree to rounding there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from kvcomm_integrations.connector.worker.forward import VirtualBatch, virtual_batch
from kvcomm_integrations.connector.worker.paged_cache import PagedCache


@dataclass(frozen=True)
class Gap:
    """Tokens ``[start, start + len(token_ids))`` of a sequence that are to be computed."""

    blocks: tuple[int, ...]
    start: int
    token_ids: tuple[int, ...]

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + len(self.token_ids)


def prepare_repair(runner: Any, cache: PagedCache, gaps: Sequence[Gap]) -> VirtualBatch:
    """Prepare to compute all gaps in one forward that writes their KV into the paged cache.

    Ranks can agree on whether all of them are prepared; inside the forward they wait for one another.

    Args:
        runner: the worker's model runner.
        cache: the worker's paged cache.
        gaps: at least one, none empty; those of one sequence must not overlap.

    Returns:
        the forward. Run on its own it returns the hidden states of the gaps' tokens, ``(tokens, hidden)``, gap after
        gap; joined to the step's forward it costs less.
    """
    ids = torch.tensor([token for gap in gaps for token in gap.token_ids], dtype=torch.int64)
    spans = [torch.arange(gap.start, gap.end, dtype=torch.int64) for gap in gaps]
    return virtual_batch(
        runner,
        token_ids=ids,
        positions=torch.cat(spans),
        slots=torch.cat([cache.slots(gap.blocks, span) for gap, span in zip(gaps, spans, strict=True)]),
        query_starts=[0, *accumulate(len(gap.token_ids) for gap in gaps)],
        seq_lens=[gap.end for gap in gaps],
        block_tables=[gap.blocks[: -(-gap.end // cache.block_size)] for gap in gaps],
    )


def repair(runner: Any, cache: PagedCache, gaps: Sequence[Gap]) -> torch.Tensor:
    """Compute all gaps now; arguments and result as of ``prepare_repair``."""
    return prepare_repair(runner, cache, gaps)()
