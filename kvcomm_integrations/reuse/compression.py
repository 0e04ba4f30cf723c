"""Low-rank factors of many small matrices at once. Knows nothing of policies.

Subspace iteration (Halko, Martinsson and Tropp, arXiv 0909.4061, section 4.5) instead of full decompositions: products
of thin matrices run well in batches on any device, decompositions one after another do not.
"""

from __future__ import annotations

import torch

SWEEPS = 3
OVERSAMPLE = 8


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
        ``left`` ``(..., m, r)`` and ``right`` ``(..., r, n)`` in the matrix's type, with ``r = min(rank, n)``.
    """
    wide = matrix.float()
    basis = leading_basis(wide.mT @ wide, rank)
    return (wide @ basis).to(matrix.dtype), basis.mT.to(matrix.dtype)
