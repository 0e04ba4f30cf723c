"""Low-rank factors of many small matrices at once.

Subspace iteration (Halko, Martinsson and Tropp, arXiv 0909.4061, section 4.5) instead of full decompositions: products
of thin matrices run well in batches on any device, decompositions one after another do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SWEEPS = 3
"""Iterations; more make the basis more exact."""
OVERSAMPLE = 8
"""Columns iterated beyond those wanted, for the same end."""


def leading_basis(gram: torch.Tensor, rank: int) -> torch.Tensor:
    """Orthonormal columns that span (nearly) the leading eigenvectors of symmetric matrices.

    Args:
        gram: positive semidefinite, ``(..., n, n)``, float32 or float64.
        rank: columns wanted; no more than ``n`` are returned.

    Returns:
        ``(..., n, min(rank, n))``. The same input gives the same result.
    """
    size, wanted = gram.shape[-1], rank + OVERSAMPLE
    if rank >= size:
        return torch.eye(size, dtype=gram.dtype, device=gram.device).expand(gram.shape)
    if wanted >= size:
        return torch.linalg.eigh(gram).eigenvectors[..., -rank:]
    seed = torch.Generator().manual_seed(0)
    basis = torch.randn(size, wanted, generator=seed, dtype=gram.dtype).to(gram.device)
    for _ in range(SWEEPS):
        basis = torch.linalg.qr(gram @ basis).Q
    return basis @ torch.linalg.eigh(basis.mT @ gram @ basis).eigenvectors[..., -rank:]


def truncate(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best approximation of matrices by a product of two thin ones (truncated singular value decomposition).

    Args:
        matrix: ``(..., m, n)``, any float type; computed in float32.
        rank: inner size of the product.

    Returns:
        ``left`` ``(..., m, r)`` and ``right`` ``(..., r, n)`` in the matrix's type, with ``r = min(rank, m, n)``.
    """
    wide = matrix.float()
    if matrix.shape[-2] < matrix.shape[-1]:
        basis = leading_basis(wide @ wide.mT, rank)
        return basis.to(matrix.dtype), (basis.mT @ wide).to(matrix.dtype)
    basis = leading_basis(wide.mT @ wide, rank)
    return (wide @ basis).to(matrix.dtype), basis.mT.to(matrix.dtype)


@dataclass(frozen=True, eq=False)
class Factors:
    """KV of one segment, factored per layer over all its heads.

    Args:
        left: ``(layers, tokens, rank)``.
        right: ``(layers, rank, kv_heads * head_dim)``.
        kv_heads: KV heads.
    """

    left: torch.Tensor
    right: torch.Tensor
    kv_heads: int

    @classmethod
    def of(cls, tensor: torch.Tensor, rank: int) -> Factors:
        """Factors of keys or values ``(layers, kv_heads, tokens, head_dim)``."""
        return cls(*truncate(tensor.transpose(1, 2).flatten(2), rank), tensor.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.left.nbytes + self.right.nbytes

    def tokens(self, start: int, end: int) -> torch.Tensor:
        """The product for tokens ``[start, end)``, ``(layers, kv_heads, tokens, head_dim)`` in float32."""
        rows = self.left[:, start:end].float() @ self.right.float()
        return rows.unflatten(2, (self.kv_heads, -1)).transpose(1, 2)
