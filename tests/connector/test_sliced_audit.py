"""An audit that is carried on in pieces computes the same tokens in the same order, the compared ones together."""

from __future__ import annotations

from random import Random

import pytest

from kvcomm_integrations.connector.worker.audit import COPIED, _parts, _pieces, _windows
from kvcomm_integrations.planning.jobs import LoadSpan
from kvcomm_integrations.reuse.edge import Edge


@pytest.mark.parametrize("seed", range(20))
def test_pieces_hold_every_token_once_in_order(seed: int) -> None:
    rnd = Random(seed)
    gaps, position = [], 0
    for _ in range(rnd.randrange(1, 6)):
        start = position + rnd.randrange(1, 50)
        position = start + rnd.randrange(6, 60)
        gaps.append((start, position))
    budget, last = rnd.randrange(1, 80), rnd.randrange(1, 6)
    pieces = list(_pieces(gaps, lambda: budget, last))
    tokens = [token for piece in pieces for start, end in piece for token in range(start, end)]
    assert tokens == [token for start, end in gaps for token in range(start, end)]
    sizes = [sum(end - start for start, end in piece) for piece in pieces]
    assert all(size == budget for size in sizes[:-1]) and sizes[-1] <= budget + last
    assert pieces[-1][-1][1] - pieces[-1][-1][0] >= last


def test_without_a_bound_it_is_one_piece() -> None:
    assert list(_pieces([(3, 9), (20, 30)], lambda: 1 << 30, 4)) == [[(3, 9), (20, 30)]]


def test_spans_and_windows_are_cut_alike() -> None:
    span = LoadSpan(7, 5, 100, 100 + 3 * COPIED, Edge("a", "b", "c", "t"))
    parts = list(_parts(span, lambda: 2))
    assert [(part.offset, part.start, part.end) for part in parts] == [
        (5, 100, 100 + 2 * COPIED),
        (5 + 2 * COPIED, 100 + 2 * COPIED, 100 + 3 * COPIED),
    ]
    assert list(_windows(0, 10, lambda: 0)) == [(0, 10)]
