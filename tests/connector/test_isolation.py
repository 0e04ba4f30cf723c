"""Approximate blocks stay out of the exact prefix cache (invariant 2), on vLLM's own requests and hashes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_integrations.connector.block_hashes import HashGuard
from tests.connector.standins import BLOCK, exact_hashes, make_request


def tokens(count: int) -> list[int]:
    return [(7 * i * i + i) % 1000 for i in range(count)]


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 6 * BLOCK), first=st.integers(0, 6 * BLOCK), steps=st.lists(st.integers(1, 20), max_size=6)
)
def test_hidden_from_the_first_approximate_block_on(length: int, first: int, steps: list[int]) -> None:
    request = make_request(tokens(length))
    guard = HashGuard(request, BLOCK)
    guard.protect(min(first, length - 1))
    border = min(first, length - 1) // BLOCK
    for step in [0, *steps]:  # blocks that the answer fills are hidden too
        request.append_output_token_ids(list(range(step)))
        exact = exact_hashes(request)
        assert len(request.block_hashes) == len(exact)
        assert request.block_hashes[:border] == exact[:border]
        assert not set(request.block_hashes[border:]) & set(exact)
        assert len(set(request.block_hashes)) == len(exact)
        assert all(isinstance(h, bytes) and len(h) == 32 for h in request.block_hashes)
    guard.restore()
    assert request.block_hashes == exact_hashes(request)
    request.append_output_token_ids(tokens(2 * BLOCK))
    assert request.block_hashes == exact_hashes(request)


def test_two_requests_never_share_hidden_hashes() -> None:
    requests = [make_request(tokens(5 * BLOCK)) for _ in range(3)]
    for request in requests:
        HashGuard(request, BLOCK).protect(BLOCK)
    hidden = [h for request in requests for h in request.block_hashes[1:]]
    assert len(hidden) == len(set(hidden)) == 12
    assert len({request.block_hashes[0] for request in requests}) == 1


def test_hiding_again_after_a_plan_was_dropped_gives_other_hashes_than_the_exact_ones() -> None:
    request = make_request(tokens(4 * BLOCK))
    guard = HashGuard(request, BLOCK)
    guard.protect(BLOCK)
    first = list(request.block_hashes)
    guard.protect(BLOCK + 3)  # the same block: idempotent
    assert request.block_hashes == first
    assert (guard.active, guard.untouched) == (True, BLOCK)
    guard.restore()
    guard.restore()
    assert (guard.active, guard.untouched) == (False, 0)
    guard.protect(2 * BLOCK)
    exact = exact_hashes(request)
    assert request.block_hashes[:2] == exact[:2] and not set(request.block_hashes[2:]) & set(exact)


def test_another_border_while_hidden_is_a_fault() -> None:
    request = make_request(tokens(4 * BLOCK))
    guard = HashGuard(request, BLOCK)
    guard.protect(BLOCK)
    with pytest.raises(RuntimeError, match="already hidden"):
        guard.protect(3 * BLOCK)


def test_a_salted_request_keeps_its_exact_beginning() -> None:
    request = make_request(tokens(4 * BLOCK), salt="tenant")
    HashGuard(request, BLOCK).protect(2 * BLOCK)
    assert request.block_hashes[:2] == exact_hashes(request)[:2]
    assert request.block_hashes[:2] != make_request(tokens(4 * BLOCK)).block_hashes[:2]


def test_without_prefix_caching_there_is_nothing_to_hide() -> None:
    request = make_request(tokens(4 * BLOCK))
    request._block_hasher, request.block_hashes = None, []
    guard = HashGuard(request, BLOCK)
    guard.protect(0)
    request.append_output_token_ids([1] * BLOCK)
    guard.restore()
    assert request.block_hashes == []
