"""What becomes of requests whose load failed and that no extra forward can save: vLLM is told which blocks are bad.

vLLM then ends such a request with an error (``kv_load_failure_policy="fail"``, its default), evicts the blocks, and
goes on. A step that was scheduled before it knew may still ask for a harvest of them; such jobs are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvcomm_integrations.connector.metadata import LoadJob

MEMORY = 8
"""Steps for which bad blocks are remembered: more than vLLM schedules ahead. Refusing longer costs a reference."""


class BadBlocks:
    """Blocks that hold neither exact nor estimated KV."""

    def __init__(self) -> None:
        self._told: set[int] = set()
        self._steps: deque[frozenset[int]] = deque(maxlen=MEMORY)

    def add(self, job: LoadJob, block_size: int) -> None:
        """The external tokens of a request are not there."""
        self._told.update(job.blocks[job.exact // block_size : -(-job.end // block_size)])

    def take(self) -> set[int]:
        """Blocks for vLLM, each told once; call it once a step."""
        told, self._told = self._told, set()
        self._steps.append(frozenset(told))
        return told

    def hold(self, blocks: Iterable[int]) -> bool:
        """Whether any of these blocks was bad a moment ago."""
        return any(self._told.intersection(blocks) or bad.intersection(blocks) for bad in (*self._steps, frozenset()))
