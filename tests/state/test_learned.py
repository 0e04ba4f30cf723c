"""Splitting by head, joining and merging change nothing but where the numbers lie."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_integrations.errors import StateFileError
from kvcomm_integrations.reuse.policies.kvcomm import KVCOMM
from kvcomm_integrations.reuse.policies.ridge import Ridge
from kvcomm_integrations.state.learned import give_to, join_shards, merge_states, take_from
from kvcomm_integrations.state.manifest import HeadRange

from .states import ALL, HEADS, MODEL, edge, equal, examples, state, taught

EDGES = [edge(), edge("critic"), edge(), edge("writer", "other"), edge("critic"), edge()]


def test_a_policy_gets_back_what_it_knew() -> None:
    lessons = examples(*EDGES)
    learned, policy = taught(lessons), Ridge()
    give_to(policy, take_from(learned, MODEL, ALL))
    for name, reference, _ in lessons:
        for mine, theirs in zip(learned.correct(name, reference), policy.correct(name, reference), strict=True):
            assert torch.equal(mine, theirs)


@settings(max_examples=20, deadline=None)
@given(where=st.lists(st.integers(0, 2), min_size=len(EDGES), max_size=len(EDGES)), seed=st.integers(0, 99))
def test_merging_is_learning_from_all(where: list[int], seed: int) -> None:
    lessons = examples(*EDGES, seed=seed)
    replicas = [[lesson for lesson, at in zip(lessons, where, strict=True) if at == number] for number in range(3)]
    merged = merge_states([state(part) for part in replicas])
    equal(merged, state(lessons), rtol=1e-4)


def test_merging_into_a_live_policy_adds() -> None:
    lessons = examples(*EDGES)
    policy = taught(lessons[:3])
    give_to(policy, state(lessons[3:]), merge=True)
    equal(take_from(policy, MODEL, ALL), state(lessons), rtol=1e-4)
    give_to(policy, state(lessons[:1]))
    equal(take_from(policy, MODEL, ALL), state(lessons[:1]))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_join_to_the_whole_and_it_splits_into_ranks(ranks: int) -> None:
    lessons = examples(*EDGES)
    count = HEADS // ranks
    shares = [state(lessons, HeadRange(first=rank * count, count=count)) for rank in range(ranks)]
    whole = state(lessons)
    equal(join_shards(shares[::-1]), whole, rtol=1e-5)
    for share in shares:
        equal(whole.of_heads(share.heads), share, rtol=1e-5)


def test_copies_of_a_head_on_several_ranks_count_once() -> None:
    lessons = examples(*EDGES)
    halves = [HeadRange(first=0, count=2), HeadRange(first=0, count=2), HeadRange(first=2, count=2)]
    equal(join_shards([state(lessons, heads) for heads in halves]), state(lessons), rtol=1e-5)


def test_a_missing_rank_is_named() -> None:
    lessons = examples(*EDGES)
    first, last = (state(lessons, HeadRange(first=at, count=1)) for at in (0, 3))
    with pytest.raises(StateFileError, match="head 1 is missing"):
        join_shards([first, last])
    with pytest.raises(StateFileError, match="only 1 of 4 heads"):
        join_shards([first])
    with pytest.raises(StateFileError, match="heads 0 to 3 are needed, but only 0 to 0"):
        first.of_heads(ALL)


def test_shares_of_different_saves_do_not_join() -> None:
    halves = [HeadRange(first=0, count=2), HeadRange(first=2, count=2)]
    with pytest.raises(StateFileError, match="do not belong together"):
        join_shards([state(examples(*EDGES), halves[0]), state(examples(*EDGES[:2]), halves[1])])


def test_states_of_different_models_do_not_merge() -> None:
    lessons = examples(*EDGES)
    other = MODEL.model_copy(update={"dtype": "bfloat16"})
    with pytest.raises(StateFileError, match="'bfloat16', not 'float32'"):
        merge_states([state(lessons), state(lessons, model=other)])
    with pytest.raises(StateFileError, match="do not merge into 0 to 3"):
        merge_states([state(lessons), state(lessons, HeadRange(first=0, count=2))])


def test_the_same_weights_elsewhere_are_the_same_model() -> None:
    moved = MODEL.model_copy(update={"name": "/data/model"})
    assert MODEL.difference(moved) is None
    unknown = moved.model_copy(update={"weights": ""})
    assert "'/data/model', not 'org/model'" in str(MODEL.difference(unknown))
    tuned = MODEL.model_copy(update={"weights": "beef"})
    assert "'beef', not 'abad1dea'" in str(MODEL.difference(tuned))


def test_one_tenant_alone() -> None:
    lessons = examples(*EDGES)
    alone = state(lessons).of_tenant("other")
    assert [known.edge.target for known in alone.edges] == ["writer"]
    assert alone.tenant == "other"
    mixed = merge_states([alone, replace(state(lessons).of_tenant("acme"))])
    assert mixed.tenant is None


def test_what_cannot_be_merged_cannot_be_saved() -> None:
    with pytest.raises(StateFileError, match="'kvcomm' learns cannot be kept"):
        take_from(KVCOMM(), MODEL, ALL)
