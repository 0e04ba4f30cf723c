"""KVCMAS: KVCOMM's anchors as low-rank factors, over references taken along the chain of agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcomm_integrations.reuse.compression import Factors
from kvcomm_integrations.reuse.policies.kvcomm import KVCOMM, Anchor, Pool, Stored


@dataclass
class KVCMAS(KVCOMM):
    """Low-rank anchors (Jeon et al., arXiv 2609.34060).

    Base and correction of an anchor are kept as a truncated singular value decomposition per layer of the matrix
    ``(tokens, kv_heads * head_dim)``. A pool of ``A`` anchors of ``T`` tokens thus holds
    ``4 A layers rank (T + kv_heads * head_dim)`` numbers instead of ``4 A layers T kv_heads * head_dim``. Where no
    anchor is as long as the content, the longest one corrects the part it covers.

    The paper's other half is the reference: the caller takes it from the agent that consumed the content just before (a
    chain reference). It pays only if that agent ran dense, so otherwise the first reference is used.

    Args:
        rank (int, 16): rank of the factors; 16 loses nothing against full rank on the models measured.
        gamma (float, 0.3): most entropy over anchors, normalised by its largest value (the paper's threshold tau).
    """

    name: ClassVar[str] = "kvcmas"

    rank: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("rank", 1)

    def _store(self, tensor: torch.Tensor) -> Stored:
        return Factors.of(tensor, self.rank)

    def _covering(self, pool: Pool, start: int, tokens: int) -> tuple[list[Anchor], int]:
        end = min(start + tokens, max(anchor.tokens for anchor in pool))
        covered = max(0, end - start)
        return ([anchor for anchor in pool if anchor.tokens >= end] if covered else []), covered
