"""Loads by the fused kernel, where the machine and the content allow it.

The kernel has to earn its trust: its first estimate is compared with the plain path's. Where the two differ, or the
kernel cannot be built, the plain path is taken from then on, and one warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch

from kvcomm_integrations.connector.paged import Layout, PagedCache
from kvcomm_integrations.reuse.affine import Correction
from kvcomm_integrations.reuse.fused import FusedCache, available
from kvcomm_integrations.reuse.policies.base import KV
from kvcomm_integrations.reuse.rope import Rope
from kvcomm_integrations.reuse.transfers import to_device

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference between the two paths, relative to the largest number, by cache dtype."""


class FusedLoads:
    """The kernel over a worker's paged cache.

    Args:
        cache: the worker's paged cache.
        kernel: the kernel over the same layers.
    """

    def __init__(self, cache: PagedCache, kernel: FusedCache) -> None:
        self._cache = cache
        self._kernel: FusedCache | None = kernel
        self._trusted = False

    @classmethod
    def over(cls, cache: PagedCache, rope: Rope) -> FusedLoads | None:
        """The kernel over a paged cache, or ``None`` where it cannot be used."""
        if cache.layout is not Layout.GPU or not available(cache.device):
            return None
        return cls(cache, FusedCache(cache.layers, rope))

    def write(
        self,
        reference: KV,
        correction: Correction | None,
        positions: torch.Tensor,
        blocks: Sequence[int],
        start: int,
        plain: Callable[[], Iterable[tuple[slice, KV]]],
    ) -> bool | None:
        """Write a content's estimate into the paged cache.

        Args:
            reference: keys before rotation and values, ``(layers, kv_heads, tokens, head_dim)``.
            correction: of these tokens; ``None`` if it is no affine map.
            positions: ``(tokens,)``, where the keys are rotated to.
            blocks: the sequence's block table.
            start: token of the sequence that the content begins at.
            plain: the same estimate by the plain path, to compare with.

        Returns:
            whether the estimate is numbers throughout; ``None``: the plain path has to write it.
        """
        if self._kernel is None or correction is None or not self._kernel.takes(reference, correction):
            return None
        end = start + reference.keys.shape[2]
        slots = to_device(self._cache.slots(blocks, torch.arange(start, end)), self._cache.device)
        try:
            strange = int(self._kernel.write(reference, correction, positions, slots))
        except Exception:  # a kernel that cannot be built or started here costs some speed, nothing else
            logger.warning("The fused kernel failed; loads take the plain path from now on", exc_info=True)
            self._kernel = None
            return None
        if self._trusted:
            return not strange
        if strange:  # the plain path decides whether the estimate or the kernel is to blame
            return None
        self._trusted = self._agrees(self._cache.read(blocks, start, end), plain())
        if not self._trusted:
            logger.warning("The fused kernel does not agree with the plain path, which loads take from now on")
            self._kernel = None
            return None
        return True

    def _agrees(self, written: KV, plain: Iterable[tuple[slice, KV]]) -> bool:
        tolerance = TOLERANCE.get(self._cache.dtype, 0.0)
        return all(
            bool((mine[layers].float() - theirs).abs().max() <= tolerance * theirs.abs().max())
            for layers, kv in plain
            for mine, theirs in zip(written, kv, strict=True)
        )
