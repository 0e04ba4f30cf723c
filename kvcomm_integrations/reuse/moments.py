"""Means and covariances that are learned one example at a time, exactly and in constant memory.

Sums of squares around a running mean (Chan, Golub and LeVeque, 1979) instead of raw sums: keys have channels whose mean
is a hundred times their spread, where raw sums in float32 would lose everything. They still add up: two sets of moments
merge into those of all rows together, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 512
"""Rows taken in at once; bounds the working memory for long segments."""


@dataclass(eq=False)
class Moments:
    """Moments of a batch of row sets, where the first ``features`` channels of a row explain all its channels.

    Args:
        rows: rows seen, the same number in every set of the batch.
        mean: mean of each channel, ``(batch, channels)``, float32.
        scatter: products of the explaining channels with all, summed around the means,
            ``(batch, features, channels)``, float32.
    """

    rows: int
    mean: torch.Tensor
    scatter: torch.Tensor

    @classmethod
    def empty(cls, batch: int, features: int, channels: int, device: torch.device) -> Moments:
        """Moments of no rows."""
        mean = torch.zeros(batch, channels, device=device)
        return cls(0, mean, torch.zeros(batch, features, channels, device=device))

    @property
    def features(self) -> int:
        """Channels that explain, counted from the first."""
        return self.scatter.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes, which do not depend on how many rows were seen."""
        return self.mean.nbytes + self.scatter.nbytes

    def add(self, rows: torch.Tensor) -> None:
        """Take in ``(batch, rows, channels)`` in float32. The tensor is used as working memory and overwritten."""
        for part in rows.split(CHUNK, dim=1):
            mean = part.mean(dim=1)
            part.sub_(mean[:, None])
            self._shift(part.shape[1], mean)
            self.scatter.baddbmm_(part[:, :, : self.features].mT, part)

    def merge(self, other: Moments) -> None:
        """Take in all rows that ``other`` has seen."""
        if other.mean.shape != self.mean.shape or other.features != self.features:
            raise ValueError(
                f"moments of {tuple(other.mean.shape)} with {other.features} features do not merge into "
                f"{tuple(self.mean.shape)} with {self.features}"
            )
        if other.rows:
            self._shift(other.rows, other.mean.to(self.mean.device))
            self.scatter += other.scatter.to(self.scatter.device)

    def _shift(self, rows: int, mean: torch.Tensor) -> None:
        """Count ``rows`` more with means ``(batch, channels)``: move the means, and the scatter with them."""
        total = self.rows + rows
        step = mean - self.mean
        weight = self.rows * rows / total
        self.scatter.baddbmm_(step[:, : self.features, None], step[:, None], alpha=weight)
        self.mean.add_(step, alpha=rows / total)
        self.rows = total
