"""Estimates a few layers at a time are those of all layers at once, for every policy; so is rotation in place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.policies import create_policy
from kvcomm_integrations.reuse.policies.policy import Policy
from kvcomm_integrations.reuse.policies.ridge import Ridge
from kvcomm_integrations.reuse.rope import Rope
from kvcomm_integrations.reuse.scratch import Scratch
from kvcomm_integrations.reuse.traits import POLICY_NAMES

from .shapes import EDGE, drifted, largest_difference, random_kv

LAYERS, HEADS, DIM = 5, 2, 4


def by_channel(kv: KV) -> KV:
    """The same numbers with keys in the order in which a CPU cache holds them."""
    return KV(kv.keys.transpose(2, 3).contiguous().transpose(2, 3), kv.values)


def taught(name: str, dtype: torch.dtype = torch.float32) -> Policy:
    policy = create_policy(name)
    for tokens in (40, 60):
        reference = random_kv(tokens, LAYERS, HEADS, DIM)
        truth = drifted(reference)
        policy.observe(EDGE, KV(*(x.to(dtype) for x in reference)), KV(*(x.to(dtype) for x in truth)))
    return policy


def gathered(policy: Policy, reference: KV, start: int, scratch: Scratch, leverage: float | None = None) -> KV:
    out = KV(torch.full_like(reference.keys, torch.nan), torch.full_like(reference.values, torch.nan))
    for layers, part in policy.estimates(EDGE, reference, start, scratch, leverage):
        out.keys[layers], out.values[layers] = part
        part.keys.fill_(9), part.values.fill_(9)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_bytes", [1, 3000, 1 << 20])
@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_few_layers_at_a_time_are_all_layers_at_once(name: str, chunk_bytes: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    policy = taught(name, dtype)
    whole = KV(*(part.to(dtype) for part in random_kv(20, LAYERS, HEADS, DIM)))
    reference = KV(whole.keys[:, :, 3:17], whole.values[:, :, 3:17])
    before = KV(whole.keys.clone(), whole.values.clone())
    expected = policy.correct(EDGE, reference, 3)
    scratch = Scratch(chunk_bytes=chunk_bytes)
    for order in (reference, by_channel(reference), reference):
        got = gathered(policy, order, 3, scratch)
        assert largest_difference(got, expected) <= (1e-5 if dtype is torch.float32 else 5e-2)
        assert torch.equal(got.keys[0], reference.keys[0]), "layer 0 is not corrected"
    assert torch.equal(whole.keys, before.keys) and torch.equal(whole.values, before.values), "references are not ours"


def test_a_known_leverage_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    policy = taught("ridge")
    content = random_kv(9, LAYERS, HEADS, DIM)
    content = KV(content.keys * 2, content.values * 2)
    expected = gathered(policy, content, 0, Scratch())
    leverage = policy.ready(EDGE, content).leverage
    monkeypatch.setattr("kvcomm_integrations.reuse.regression.EdgeRegression.leverage", None)
    assert largest_difference(gathered(policy, content, 0, Scratch(), leverage), expected) == 0


def test_what_was_prepared_is_used_until_the_edge_learns_more(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ridge, unprepared = Ridge(), Ridge()
    reference = random_kv(50, LAYERS, HEADS, DIM)
    truth, content = drifted(reference), random_kv(9, LAYERS, HEADS, DIM)
    for policy in (ridge, unprepared):
        policy.observe(EDGE, reference, truth)
    ridge.prepare(EDGE)
    assert ridge.state_bytes() == 1.0 * ridge.state_bytes(EDGE) > 0
    with monkeypatch.context() as patch:
        patch.setattr("kvcomm_integrations.reuse.regression.EdgeRegression._solve", None)
        early = ridge.correct(EDGE, content)
    assert largest_difference(early, unprepared.correct(EDGE, content)) == 0
    for policy in (ridge, unprepared):
        policy.observe(EDGE, truth, reference)
    assert largest_difference(ridge.correct(EDGE, content), unprepared.correct(EDGE, content)) == 0
    ridge.forget(EDGE)
    ridge.prepare(EDGE)
    assert ridge.edges() == ()


@settings(max_examples=25, deadline=None)
@given(
    interleaved=st.booleans(),
    inverse=st.booleans(),
    pairs=st.integers(1, 3),
    scale=st.sampled_from([1.0, 1.3]),
    tokens=st.integers(0, 9),
)
def test_rotation_in_place_is_rotation(interleaved: bool, inverse: bool, pairs: int, scale: float, tokens: int) -> None:
    torch.manual_seed(tokens)
    rope = Rope(1.0 / 10.0 ** torch.arange(pairs), interleaved=interleaved, scale=scale)
    keys, positions = torch.randn(3, 2, tokens, 7), torch.randint(0, 500, (tokens,))
    rows = keys.transpose(2, 3).clone(memory_format=torch.contiguous_format)
    got = rope.rotate_rows(rows, positions, Scratch(), inverse=inverse)
    assert got is rows
    torch.testing.assert_close(got.transpose(2, 3), rope.rotate(keys, positions, inverse=inverse), atol=1e-5, rtol=1e-5)


def test_buffers_are_kept_and_grow_to_the_largest() -> None:
    scratch = Scratch(chunk_bytes=4096)
    first = scratch.take("a", 4, 8)
    assert scratch.take("a", 2, 8).data_ptr() == first.data_ptr()
    assert scratch.take("b", 4).data_ptr() != first.data_ptr()
    assert scratch.nbytes == 4 * (32 + 4)
    shape = torch.Size((7, 2, 16, 8))  # 2,048 bytes of keys and values a layer
    assert list(scratch.chunks(shape, 1)) == [slice(1, 3), slice(3, 5), slice(5, 7)]
    assert list(Scratch(chunk_bytes=1).chunks(torch.Size((2, 2, 16, 8)))) == [slice(0, 1), slice(1, 2)]
