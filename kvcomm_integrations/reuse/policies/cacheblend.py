"""CacheBlend: rotate, and recompute the tokens that deviate most. For comparison only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcomm_integrations.reuse.policies.policy import Policy


@dataclass
class CacheBlend(Policy):
    """Selective recomputation (Yao et al., arXiv 2405.16444).

    Nothing is learned. Layer 1 is recomputed for all tokens; those whose KV deviates most there are recomputed in all
    layers. The policy selects them, the engine recomputes.

    The true keys of layer 1 are known in audits and benchmarks only. In real use they would take a forward through the
    first two layers before anything is loaded, which the engine does not run, so requests under this policy are served
    densely and their report says so.

    Args:
        share (float, 0.15): share of a content's tokens that is recomputed.
    """

    name: ClassVar[str] = "cacheblend"

    share: float = 0.15

    def __post_init__(self) -> None:
        self._check_range("share", 0, 1)

    def select(self, estimate: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """The ``share`` of tokens, rounded up, whose estimate is furthest from the truth; see `Policy.select`."""
        if estimate.shape != truth.shape:
            raise ValueError(f"estimate {tuple(estimate.shape)} and truth {tuple(truth.shape)} differ in shape")
        deviation = (estimate.float() - truth.float()).square().sum(dim=(0, 2))
        return deviation.topk(math.ceil(self.share * len(deviation))).indices.sort().values
