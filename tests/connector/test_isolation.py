"""Approximate blocks stay out of the exact prefix cache (invariant 2), on vLLM's own requests and hashes.

Only their own lineage finds them again (invariant 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_integrations.connector.block_hashes import HashGuard
from kvcomm_integrations.planning.lineages import Lineage
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


class Cache:
    """What a prefix cache holds."""

    def __init__(self, *hashes: Iterable[bytes]) -> None:
        self.held = {value for some in hashes for value in some}

    def __call__(self, hashes: Sequence[Any]) -> int:
        return next((n for n, value in enumerate(hashes) if value not in self.held), len(hashes))


def hidden_run(ids: list[int], first: int, lineage: Lineage) -> list[bytes]:
    """The hashes of a finished request with an estimate at token ``first``."""
    request = make_request(ids)
    HashGuard(request, BLOCK, lineage).protect(first)
    return list(request.block_hashes)


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.integers(1, 5 * BLOCK),
    first=st.integers(0, 5 * BLOCK),
    answer=st.lists(st.integers(1, 2 * BLOCK), max_size=5),
    new=st.integers(0, 3 * BLOCK),
)
def test_a_prompt_hashed_in_one_go_finds_an_answer_hashed_block_by_block(
    prompt: int, first: int, answer: list[int], new: int
) -> None:
    lineage, first = Lineage(), min(first, prompt - 1)
    request = make_request(tokens(prompt))
    HashGuard(request, BLOCK, lineage).protect(first)
    for number, step in enumerate(answer):
        request.append_output_token_ids([500 + number] * step)
    later = make_request([*request.all_token_ids, *range(2000, 2000 + new)])
    guard = HashGuard(later, BLOCK, lineage)
    cache = Cache(request.block_hashes)
    found = guard.take_over(cache)
    assert found == (first // BLOCK < len(request.block_hashes))
    assert later.block_hashes[: len(request.block_hashes)] == request.block_hashes
    if found:
        assert guard.untouched == first // BLOCK * BLOCK
        assert guard.exact_hashes == exact_hashes(later)
        assert not set(later.block_hashes[first // BLOCK :]) & set(exact_hashes(later))


def test_a_dropped_plan_leaves_the_past_and_disowning_leaves_nothing() -> None:
    lineage, ids = Lineage(), tokens(5 * BLOCK)
    cache = Cache(hidden_run(ids, BLOCK + 3, lineage))
    request = make_request([*ids, *range(2000, 2000 + 2 * BLOCK)])
    guard = HashGuard(request, BLOCK, lineage)
    assert guard.take_over(cache)
    assert not guard.take_over(cache), "once is enough"
    past = list(request.block_hashes)
    for _ in range(2):
        guard.protect(5 * BLOCK + 1)
        guard.restore()
        assert (request.block_hashes, guard.inherited, guard.active) == (past, True, True)
    with pytest.raises(RuntimeError, match="already hidden"):
        guard.protect(0)
    guard.protect(5 * BLOCK + 1)
    guard.disown()
    assert (guard.inherited, guard.active, guard.untouched) == (False, False, 0)
    assert request.block_hashes == exact_hashes(request)
    request.append_output_token_ids(tokens(2 * BLOCK))
    assert request.block_hashes == exact_hashes(request)


def test_who_differs_before_the_first_hidden_block_ends_has_no_past() -> None:
    lineage, ids = Lineage(), tokens(4 * BLOCK)
    cache = Cache(hidden_run(ids, BLOCK, lineage))
    for place in (0, BLOCK - 1, BLOCK, 2 * BLOCK - 1):
        assert not HashGuard(make_request(edited(ids, place)), BLOCK, lineage).take_over(cache)
    assert not HashGuard(make_request(ids, salt="another"), BLOCK, lineage).take_over(cache)
    assert not HashGuard(make_request(ids), BLOCK, Lineage()).take_over(cache)
    stranger = Lineage()
    hidden_run(tokens(4 * BLOCK)[::-1], 0, stranger)
    assert not HashGuard(make_request(ids), BLOCK, stranger).take_over(cache)


def edited(ids: list[int], place: int) -> list[int]:
    return [*ids[:place], ids[place] + 1, *ids[place + 1 :]]


def test_a_fork_shares_what_comes_before_it() -> None:
    lineage, ids = Lineage(), tokens(5 * BLOCK)
    cache = Cache(trunk := hidden_run(ids, BLOCK, lineage))
    fork = make_request(edited(ids, 3 * BLOCK + 1))
    guard = HashGuard(fork, BLOCK, lineage)
    assert guard.take_over(cache)
    assert fork.block_hashes[:3] == trunk[:3]
    assert not set(fork.block_hashes[3:]) & set(trunk)
    assert cache(fork.block_hashes) == 3


def test_exact_blocks_win_as_far_as_they_reach() -> None:
    lineage, ids = Lineage(), tokens(6 * BLOCK)
    past, exact = hidden_run(ids, BLOCK, lineage), exact_hashes(make_request(ids))
    for reach in range(1, 7):
        request = make_request(ids)
        guard = HashGuard(request, BLOCK, lineage)
        cache = Cache(past, exact[:reach])
        assert guard.take_over(cache) == (reach < 6)
        assert request.block_hashes == [*exact[:reach], *past[reach:]]
        assert cache(request.block_hashes) == 6
    evicted = HashGuard(make_request(ids), BLOCK, lineage)
    assert not evicted.take_over(Cache(exact[:2], past[3:])), "it does not go on from there"


def test_a_plan_that_was_dropped_does_not_hide_the_past_of_a_later_one() -> None:
    lineage, ids = Lineage(), tokens(6 * BLOCK)
    request = make_request(ids)
    guard = HashGuard(request, BLOCK, lineage)
    guard.protect(BLOCK)  # vLLM had no blocks for it; meanwhile another request has computed three of them exactly
    guard.restore()
    guard.protect(3 * BLOCK)
    cache = Cache(request.block_hashes)
    later = make_request([*ids, 1])
    assert HashGuard(later, BLOCK, lineage).take_over(cache)
    assert cache(later.block_hashes) == 6


def test_two_runs_of_one_lineage_that_are_hidden_from_different_blocks_agree() -> None:
    lineage, ids = Lineage(), tokens(6 * BLOCK)
    early, late = hidden_run(ids, BLOCK, lineage), hidden_run(ids, 4 * BLOCK, lineage)
    assert early[4:] == late[4:]
    for cache in (Cache(early), Cache(late), Cache(late[:4], early[3:])):
        request = make_request(ids)
        assert HashGuard(request, BLOCK, lineage).take_over(cache)
        assert cache(request.block_hashes) == 6


def test_what_was_forgotten_is_not_taken_over() -> None:
    lineage, ids = Lineage(), tokens(4 * BLOCK)
    cache = Cache(hidden_run(ids, BLOCK, lineage))
    guard = HashGuard(make_request(ids), BLOCK, lineage)
    lineage.forgotten = True
    assert guard.forgotten
    assert not guard.take_over(cache)


def test_without_prefix_caching_there_is_nothing_to_take_over() -> None:
    lineage, ids = Lineage(), tokens(4 * BLOCK)
    cache = Cache(hidden_run(ids, BLOCK, lineage))
    request = make_request(ids)
    request._block_hasher, request.block_hashes = None, []
    guard = HashGuard(request, BLOCK, lineage)
    assert not guard.take_over(cache)
    guard.disown()
    assert request.block_hashes == []
