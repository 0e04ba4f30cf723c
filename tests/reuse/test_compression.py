"""Low-rank factors against the exact decomposition."""

import pytest
import torch

from kvcomm_integrations.reuse.compression import leading_basis, truncate


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (5, 5)])
@pytest.mark.parametrize("rank", [1, 3, 50])
def test_truncate_is_nearly_the_best_approximation(shape, rank):
    torch.manual_seed(0)
    m, n = shape
    matrix = torch.randn(2, 3, m, n) * torch.exp(-torch.arange(n) / 2.0)
    left, right = truncate(matrix, rank)
    r = min(rank, m, n)
    assert left.shape == (2, 3, m, r) and right.shape == (2, 3, r, n)
    exact = torch.linalg.svdvals(matrix)[..., r:].square().sum(-1)
    error = (matrix - left @ right).square().sum((-1, -2))
    assert (error <= 1.05 * exact + 1e-5 * matrix.square().sum((-1, -2))).all()


@pytest.mark.parametrize("true_rank", [0, 1, 2])
def test_matrices_of_lower_rank_are_kept_whole(true_rank):
    torch.manual_seed(0)
    matrix = torch.randn(4, 30, true_rank) @ torch.randn(4, true_rank, 10)
    left, right = truncate(matrix, 5)
    torch.testing.assert_close(left @ right, matrix, atol=1e-4, rtol=1e-4)


def test_types_and_empty_matrices():
    left, right = truncate(torch.randn(2, 6, 4).bfloat16(), 2)
    assert left.dtype == right.dtype == torch.bfloat16
    left, right = truncate(torch.randn(2, 0, 4), 2)
    assert left.shape == (2, 0, 0) and right.shape == (2, 0, 4)


def test_a_basis_is_orthonormal_and_repeatable():
    torch.manual_seed(0)
    half = torch.randn(3, 20, 20)
    basis = leading_basis(half @ half.mT, 6)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(6).expand(3, 6, 6), atol=1e-4, rtol=0)
    assert torch.equal(basis, leading_basis(half @ half.mT, 6))
