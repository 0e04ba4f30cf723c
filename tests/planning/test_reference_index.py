"""The reference index and its search for parts: budget, order of eviction, reservations, acknowledgements."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_integrations.planning.content_keys import ContentKey
from kvcomm_integrations.planning.entries import Entry, EntryState, Reservation
from kvcomm_integrations.planning.ngram_index import LONGEST, WINDOW, NgramIndex
from kvcomm_integrations.planning.reference_index import ReferenceIndex


def reserve(index: ReferenceIndex, name: str, tokens: int, *, ready: bool = True, scope: str = "s") -> Entry | None:
    entry = index.reserve(Reservation(ContentKey(scope, name), tokens, name, "a", dense=True, owner="r"))
    if entry is not None and ready:
        index.acknowledge(entry.ref_id, index.ranks)
    return entry


def names(index: ReferenceIndex) -> list[str]:
    return [entry.reserved.name for entry in index.entries()]


ACTIONS = st.one_of(
    st.tuples(st.just("reserve"), st.integers(0, 11), st.integers(-1, 7)),
    st.tuples(st.just("acknowledge"), st.integers(1, 40), st.integers(1, 2)),
    st.tuples(st.just("withdraw"), st.integers(1, 40), st.just(0)),
    st.tuples(st.just("touch"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("scope"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("drops"), st.just(0), st.just(0)),
)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 200), st.lists(ACTIONS, max_size=60))
def test_the_budget_holds_and_nothing_is_lost(budget: int, actions: list[tuple[str, int, int]]) -> None:
    index = ReferenceIndex(budget, 10, 2)
    issued: set[int] = set()
    dropped: list[int] = []
    for action, a, b in actions:
        reserved = {e.ref_id for e in index.entries() if e.state is EntryState.RESERVED}
        if action == "reserve":
            entry = index.reserve(Reservation(ContentKey(f"s{a % 2}", str(a)), b, "n", "x", dense=True, owner="r"))
            if entry is not None:
                assert entry.ref_id not in issued and entry.nbytes == 10 * b > 0
                issued.add(entry.ref_id)
            assert reserved <= {e.ref_id for e in index.entries()}  # what is being computed is never evicted
        elif action == "acknowledge":
            before = index.by_id(a).acknowledged if index.by_id(a) else None  # type: ignore[union-attr]
            index.acknowledge(a, b)
            if before is not None:
                found = index.by_id(a)
                assert found is not None and (found.state is EntryState.READY) == (before + b >= 2)
        elif action == "withdraw":
            index.withdraw(a)
            assert index.by_id(a) is None
        elif action == "touch":
            entry = index.lookup(ContentKey(f"s{a % 2}", str(a)))
            if entry is not None:
                index.touch(entry)
                assert index.entries()[-1] is entry
        elif action == "scope":
            held = sum(e.key.scope == f"s{a}" for e in index.entries())
            assert index.withdraw_scope(f"s{a}") == held
        else:
            dropped += index.take_drops()
        assert index.used == sum(e.nbytes for e in index.entries()) <= budget
        assert len(index) == len(index.entries())
    held_ids = {e.ref_id for e in index.entries()}
    dropped += index.take_drops()
    assert len(dropped) == len(set(dropped))
    assert set(dropped) == issued - held_ids  # workers hear of everything that is gone, once
    index.clear()
    assert (len(index), index.used) == (0, 0)


def test_the_least_recently_used_goes_first() -> None:
    index = ReferenceIndex(30, 1, 1)
    for name in "abc":
        reserve(index, name, 10)
    index.touch(index.entries()[0])
    reserve(index, "d", 15)
    assert names(index) == ["a", "d"]
    assert index.evictions == 2
    assert sorted(index.take_drops()) == [2, 3]


def test_reservations_stay() -> None:
    index = ReferenceIndex(30, 1, 1)
    reserve(index, "reserved", 20, ready=False)
    reserve(index, "ready", 10)
    assert reserve(index, "new", 10) is not None
    assert names(index) == ["reserved", "new"]


def test_nothing_is_evicted_for_what_cannot_fit_anyway() -> None:
    index = ReferenceIndex(30, 1, 1)
    reserve(index, "reserved", 20, ready=False)
    reserve(index, "ready", 10)
    assert reserve(index, "too much", 11) is None
    assert reserve(index, "far too much", 31) is None
    assert names(index) == ["reserved", "ready"]
    assert (index.evictions, index.take_drops()) == (0, [])


def test_a_reference_is_ready_once_every_rank_holds_it() -> None:
    index = ReferenceIndex(100, 1, 4)
    entry = reserve(index, "a", 10, ready=False)
    assert entry is not None
    for ranks in (1, 2):
        index.acknowledge(entry.ref_id, ranks)
        assert entry.state is EntryState.RESERVED
    index.acknowledge(entry.ref_id, 1)
    assert entry.state is EntryState.READY
    index.acknowledge(99, 4)  # of something forgotten in the meantime


def test_the_same_content_is_reserved_once_per_scope() -> None:
    index = ReferenceIndex(100, 1, 1)
    assert reserve(index, "a", 10) is not None
    assert reserve(index, "a", 10) is None
    assert reserve(index, "a", 10, scope="other") is not None


def test_parts_are_found_at_their_place_and_forgotten() -> None:
    index = ReferenceIndex(1000, 1, 1)
    ids = list(range(100, 140))
    entry = index.reserve(Reservation(ContentKey("s", "whole"), 40, "n", "a", dense=True), ids)
    assert entry is not None
    assert index.find(ContentKey("s", "part"), ids[7:30]) == (entry, 7)
    assert index.find(ContentKey("s", "part"), ids) == (entry, 0)
    assert index.find(ContentKey("s", "part"), ids[32:]) == (entry, 32)
    assert index.find(ContentKey("other", "part"), ids[7:30]) == (None, 0)
    assert index.find(ContentKey("s", "part"), [*ids[7:30], 5]) == (None, 0)
    assert index.find(ContentKey("s", "part"), [*ids[30:], 140]) == (None, 0)  # longer than what is held
    assert index.find(ContentKey("s", "part"), ids[7 : 7 + WINDOW - 1]) == (None, 0)
    index.withdraw(entry.ref_id)
    assert index.find(ContentKey("s", "part"), ids[7:30]) == (None, 0)


def naive_find(held: dict[int, tuple[str, list[int]]], scope: str, ids: list[int]) -> set[tuple[int, int]]:
    return {
        (ref, at)
        for ref, (where, whole) in held.items()
        if where == scope
        for at in range(len(whole) - len(ids) + 1)
        if whole[at : at + len(ids)] == ids
    }


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_found_part_really_is_there(data: st.DataObject) -> None:
    runs = NgramIndex()
    held: dict[int, tuple[str, list[int]]] = {}
    texts = st.lists(st.integers(0, 2), min_size=0, max_size=30)
    for ref in range(data.draw(st.integers(1, 5))):
        held[ref] = (data.draw(st.sampled_from("st")), data.draw(texts))
        runs.add(ref, *held[ref])
    for ref in data.draw(st.lists(st.integers(0, 5))):
        runs.remove(ref)
        held.pop(ref, None)
    for _ in range(3):
        scope, ids = data.draw(st.sampled_from("st")), data.draw(texts)
        run = runs.find(scope, ids)
        if run is not None:
            assert (run.ref_id, run.offset) in naive_find(held, scope, ids)
    for ref in list(held):
        runs.remove(ref)
    assert len(runs) == 0


def test_too_long_and_too_short_references_are_not_searched() -> None:
    runs = NgramIndex()
    runs.add(1, "s", range(LONGEST + 1))
    runs.add(2, "s", range(WINDOW - 1))
    assert len(runs) == 0
    runs.remove(1)


@pytest.mark.parametrize("tokens", [0, -3])
def test_nothing_is_reserved_for_no_tokens(tokens: int) -> None:
    assert reserve(ReferenceIndex(100, 1, 1), "a", tokens) is None
