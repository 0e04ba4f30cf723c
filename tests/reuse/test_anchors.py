"""KVCOMM and KVCMAS against numbers computed apart from them, in numpy, straight from the formulas."""

import math

import numpy as np
import pytest
import torch

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.reuse.compression import Factors
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.policies.kvcmas import KVCMAS
from kvcomm_integrations.reuse.policies.kvcomm import KVCOMM

from .shapes import EDGE, drifted, largest_difference, random_kv


def examples(lengths: tuple[int, ...], seed: int = 0) -> list[tuple[KV, KV]]:
    torch.manual_seed(seed)
    return [(kv := random_kv(tokens), drifted(kv)) for tokens in lengths]


def taught(policy: KVCOMM, pairs: list[tuple[KV, KV]]) -> KVCOMM:
    for pair in pairs:
        policy.observe(EDGE, *pair)
    return policy


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=0))
    return e / e.sum(axis=0)


def expected_side(pairs: list[tuple[KV, KV]], content: torch.Tensor, side: int, temperature: float, start: int = 0):
    """``content + sum_a softmax_a(-mean|content - base_a| / temperature) delta_a``, per token; layer 0 untouched."""
    x = content.double().numpy()
    span = slice(start, start + x.shape[2])
    bases = [pair[0][side].double().numpy()[:, :, span] for pair in pairs]
    deltas = [pair[1][side].double().numpy()[:, :, span] - b for pair, b in zip(pairs, bases, strict=True)]
    weights = softmax(np.stack([-np.abs(x - b).mean(axis=(0, 1, 3)) for b in bases]) / temperature)
    out = x + sum(w[None, None, :, None] * d for w, d in zip(weights, deltas, strict=True))
    out[0] = x[0]
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.05])
def test_corrections_equal_the_formula(temperature):
    pairs = examples((7, 9, 12))
    policy = taught(KVCOMM(temperature=temperature), pairs)
    content = random_kv(6)
    estimate = policy.correct(EDGE, content)
    for side in (0, 1):
        expected = expected_side(pairs, content[side], side, temperature)
        np.testing.assert_allclose(estimate[side].numpy(), expected, atol=1e-5)


def test_only_anchors_at_least_as_long_take_part():
    pairs = examples((5, 9, 12))
    policy = taught(KVCOMM(), pairs)
    content = random_kv(8)
    expected = expected_side(pairs[1:], content.values, 1, 1.0)
    np.testing.assert_allclose(policy.correct(EDGE, content).values.numpy(), expected, atol=1e-5)
    longer = random_kv(13)
    assert largest_difference(policy.correct(EDGE, longer), longer) == 0
    assert not policy.ready(EDGE, longer).ready


def test_a_part_is_compared_with_the_same_part_of_anchors():
    pairs = examples((9, 12))
    policy = taught(KVCOMM(), pairs)
    content = random_kv(4)
    expected = expected_side(pairs, content.keys, 0, 1.0, start=5)
    np.testing.assert_allclose(policy.correct(EDGE, content, start=5).keys.numpy(), expected, atol=1e-5)
    outside = policy.correct(EDGE, content, start=10)
    assert largest_difference(outside, content) == 0


@pytest.mark.parametrize("closeness", [0.0, 0.5, 0.9, 1.0])
def test_the_entropy_gate_equals_the_formula(closeness):
    pairs = examples((9, 9, 9))
    policy = taught(KVCOMM(gamma=0.3), pairs)
    mean = sum(pair[0].values for pair in pairs) / 3
    content = KV(random_kv(9).keys, closeness * mean + (1 - closeness) * pairs[1][0].values)
    values = content.values.double().numpy()
    norms = np.array([np.linalg.norm(values - pair[0].values.double().numpy()) for pair in pairs])
    share = softmax(-norms)
    entropy = -(share * np.log(share)).sum()
    readiness = policy.ready(EDGE, content)
    assert readiness.leverage == pytest.approx(entropy / (0.3 * math.log(3)), rel=1e-4, abs=1e-9)
    assert readiness.ready == (entropy <= 0.3 * math.log(3))
    assert readiness.examples == 3


def test_one_anchor_predicts_nothing():
    policy = taught(KVCOMM(), examples((9,)))
    readiness = policy.ready(EDGE, random_kv(9))
    assert (readiness.ready, readiness.leverage, readiness.examples) == (False, None, 1)


def test_the_least_used_of_the_oldest_makes_room():
    pairs = examples((9, 9, 9, 9))
    policy = taught(KVCOMM(max_anchors=3, window=2), pairs[:3])
    policy.correct(EDGE, pairs[0][0])  # equals anchor 0, which is then the only one used
    policy.observe(EDGE, *pairs[3])
    kept = [pairs[0], pairs[2], pairs[3]]  # of the oldest two, anchor 1 was never used
    content = random_kv(9)
    expected = expected_side(kept, content.keys, 0, 1.0)
    np.testing.assert_allclose(policy.correct(EDGE, content).keys.numpy(), expected, atol=1e-5)
    assert policy.ready(EDGE).examples == 3


def test_selective_leaves_out_what_is_predictable():
    pairs = examples((9, 9))
    close = KV(pairs[0][0].keys, pairs[0][0].values + 1e-3)
    assert taught(KVCOMM(), [*pairs, (close, close)]).ready(EDGE).examples == 3
    assert taught(KVCOMM(selective=True), [*pairs, (close, close)]).ready(EDGE).examples == 2


def test_kvcmas_at_full_rank_equals_kvcomm():
    pairs = examples((9, 12))
    content = random_kv(8)
    full = taught(KVCMAS(rank=8), pairs).correct(EDGE, content)
    assert largest_difference(full, taught(KVCOMM(), pairs).correct(EDGE, content)) < 1e-5


def test_kvcmas_loses_nothing_on_corrections_of_low_rank():
    """Weights come from truncated bases, but equal corrections make weights irrelevant."""
    torch.manual_seed(0)
    delta = torch.randn(3, 12, 2) @ torch.randn(3, 2, 8)
    shift = delta.unflatten(2, (2, 4)).transpose(1, 2)
    shift[0] = 0
    pairs = [(kv := random_kv(12), KV(kv.keys + shift, kv.values - shift)) for _ in range(3)]
    content = random_kv(12)
    estimate = taught(KVCMAS(rank=2), pairs).correct(EDGE, content)
    assert largest_difference(estimate, KV(content.keys + shift, content.values - shift)) < 1e-4


def test_kvcmas_memory_is_its_formula():
    policy = taught(KVCMAS(rank=2), examples((30, 20)))
    assert policy.state_bytes(EDGE) == sum(4 * 3 * 2 * (tokens + 2 * 4) * 4 for tokens in (30, 20))


def test_kvcmas_corrects_the_part_its_longest_anchor_covers():
    pairs = examples((5, 9))
    policy = taught(KVCMAS(rank=8), pairs)
    content = random_kv(12)
    estimate = policy.correct(EDGE, content)
    head = expected_side(pairs[1:], content.keys[:, :, :9], 0, 1.0)
    np.testing.assert_allclose(estimate.keys[:, :, :9].numpy(), head, atol=1e-5)
    assert torch.equal(estimate.keys[:, :, 9:], content.keys[:, :, 9:])


def test_factors_give_back_any_part():
    torch.manual_seed(0)
    tensor = random_kv(10).keys
    torch.testing.assert_close(Factors.of(tensor, 8).tokens(3, 7), tensor[:, :, 3:7], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{"max_anchors": 0}, {"gamma": 1.5}, {"temperature": 0.0}, {"window": 0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        KVCOMM(**options)
