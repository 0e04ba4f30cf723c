"""The worker's store keeps exact account of its bytes and never evicts by itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_integrations.reuse.references import Reference, ReferenceStore, StoreFullError


def reference(ref_id: int, tokens: int, dtype: torch.dtype = torch.float32) -> Reference:
    shape = (2, 1, tokens, 4)
    return Reference(
        ref_id, torch.zeros(shape, dtype=dtype), torch.ones(shape, dtype=dtype), position=7, source="coder"
    )


def test_a_reference_knows_its_size():
    ref = reference(1, 3, torch.bfloat16)
    assert (ref.tokens, ref.nbytes, ref.source, ref.position, ref.dense) == (3, 2 * 2 * 3 * 4 * 2, "coder", 7, True)
    assert ref.kv.keys is ref.keys and ref.kv.values is ref.values


def test_shapes_that_disagree_are_refused():
    with pytest.raises(ValueError, match="reference 4"):
        Reference(4, torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 5, 4))


def test_overflow_is_refused_and_changes_nothing():
    store = ReferenceStore(max_bytes=reference(0, 3).nbytes)
    store.put(reference(1, 2))
    with pytest.raises(StoreFullError, match="store_bytes"):
        store.put(reference(2, 2))
    assert list(store) == [1] and store.nbytes == reference(1, 2).nbytes
    store.put(reference(1, 3))  # replacing needs no room for both
    assert store.get(1).tokens == 3


def test_a_missing_reference_is_named():
    with pytest.raises(KeyError, match="reference 9"):
        ReferenceStore(100).get(9)


commands = st.lists(st.tuples(st.sampled_from(["put", "drop", "clear"]), st.integers(0, 4), st.integers(0, 6)))


@settings(max_examples=50, deadline=None)
@given(commands)
def test_bytes_are_always_the_sum_of_what_is_held(orders):
    store = ReferenceStore(max_bytes=800)
    held: dict[int, int] = {}
    for order, ref_id, tokens in orders:
        if order == "put":
            size = reference(ref_id, tokens).nbytes
            if sum(held.values()) - held.get(ref_id, 0) + size <= 800:
                store.put(reference(ref_id, tokens))
                held[ref_id] = size
            else:
                with pytest.raises(StoreFullError):
                    store.put(reference(ref_id, tokens))
        elif order == "drop":
            assert store.drop(ref_id) == (held.pop(ref_id, None) is not None)
        else:
            store.clear()
            held.clear()
        assert store.nbytes == sum(held.values()) <= 800
        assert set(store) == set(held) and all(ref in store for ref in held)
