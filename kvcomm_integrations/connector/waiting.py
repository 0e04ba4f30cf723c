"""When a request had better wait a step: for a content another one is computing, or for blocks not written yet."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from kvcomm_integrations.connector.compat import Request, RequestStatus
from kvcomm_integrations.connector.contents import Contents
from kvcomm_integrations.connector.index import EntryState
from kvcomm_integrations.connector.tracking import Tracked

PREFILL_WAIT_S = 60.0
"""Longest wait for another request's prefill before a request goes ahead by itself, seconds."""


def wants_promised(contents: Contents, tracked: Tracked, exact: int) -> bool:
    """Another request is computing a content that this one could load."""
    return any(
        entry is not None and entry.state is EntryState.PROMISED and segment.end > exact
        for segment in contents.placeholders(tracked)
        for entry, _ in (contents.find(tracked, segment),)
    )


def may_wait(tracked: Tracked) -> bool:
    """Whether a request has patience left; the first call starts its clock."""
    now = time.monotonic()
    tracked.first_wait = tracked.first_wait or now
    return now - tracked.first_wait < PREFILL_WAIT_S


def hits_unwritten(request: Request, exact: int, hash_block: int, others: Iterable[Request]) -> bool:
    """The exact hit holds a block that another request is about to write in this very step.

    vLLM files blocks before they are computed; its own forward copes, but the repair pass runs before it.
    """
    blocks = exact // hash_block
    return blocks > 0 and any(
        other is not request
        and other.status == RequestStatus.RUNNING
        and other.num_computed_tokens < exact
        and other.num_computed_tokens < hash_block * _shared(request.block_hashes[:blocks], other.block_hashes)
        for other in others
    )


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Leading blocks that two chains of hashes have in common: blocks that differ never agree again."""
    most = min(len(one), len(other))
    return bisect_left(range(most), True, key=lambda block: one[block] != other[block])
