"""The ridge policy: exact where it can be, independent of order, constant in size, shrinking where it knows nothing."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.policies.ridge import Ridge, penalty_for

from .shapes import EDGE, drifted, largest_difference, random_kv


def affine_truth(reference: KV, weights: torch.Tensor, offset: torch.Tensor) -> KV:
    """``x + x W + b`` per layer and head on ``x = [K | V]``; layer 0 untouched."""
    x = torch.cat(reference, dim=-1)
    y = x + x @ weights + offset
    y[0] = x[0]
    return KV(*y.split(reference.keys.shape[-1], dim=-1))


def affine_parts(dim: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return 0.3 * torch.randn(3, 2, 2 * dim, 2 * dim), torch.randn(3, 2, 1, 2 * dim)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_an_affine_correction_is_found_exactly(seed):
    torch.manual_seed(seed)
    weights, offset = affine_parts()
    ridge = Ridge(rank=8, penalty=1e-6)
    for tokens in (40, 30, 50, 45):
        reference = random_kv(tokens)
        ridge.observe(EDGE, reference, affine_truth(reference, weights, offset))
    content = KV(*(0.7 * part for part in random_kv(20)))  # leverage below 0.8: the map is trusted fully
    ridge_estimate = ridge.correct(EDGE, content)
    assert largest_difference(ridge_estimate, affine_truth(content, weights, offset)) < 2e-3


def test_it_equals_the_formula():
    """Against a dense solve in float64 from raw rows, head by head, written straight from the definition."""
    torch.manual_seed(0)
    examples = [(kv := random_kv(tokens), drifted(kv)) for tokens in (9, 14, 11)]
    ridge = Ridge(rank=99)
    for reference, truth in examples:
        ridge.observe(EDGE, reference, truth)
    content = random_kv(7)
    estimate = torch.cat(ridge.correct(EDGE, content), dim=-1)
    trust = min(1.0, 0.8 / ridge.ready(EDGE, content).leverage)
    penalty = penalty_for(tokens=34, features=12)

    def features(kv: KV, layer: int, head: int) -> torch.Tensor:
        x = torch.cat([kv.keys[layer, head], kv.values[layer, head]], dim=-1).double()
        t = torch.arange(len(x), dtype=torch.float64)[:, None]
        return torch.cat([x, torch.exp(-t / torch.tensor([2.0, 8.0, 32.0, 128.0]))], dim=-1)

    for layer, head in itertools.product((1, 2), (0, 1)):
        x = torch.cat([features(reference, layer, head) for reference, _ in examples])
        d = torch.cat([features(truth, layer, head) for _, truth in examples])[:, :8] - x[:, :8]
        mean, spread = x.mean(0), x.std(0, correction=0)
        z = (x - mean) / spread
        gram = z.T @ z / len(z) + penalty * torch.eye(12, dtype=torch.float64)
        w = torch.linalg.solve(gram, z.T @ (d - d.mean(0)) / len(z))
        new = features(content, layer, head)
        expected = new[:, :8] + d.mean(0) + trust * ((new - mean) / spread) @ w
        torch.testing.assert_close(estimate[layer, head].double(), expected, atol=1e-4, rtol=1e-4)


def test_leverage_equals_the_formula():
    torch.manual_seed(0)
    ridge, x = Ridge(), []
    for tokens in (9, 14):
        reference = random_kv(tokens)
        ridge.observe(EDGE, reference, drifted(reference))
        x.append(torch.cat(reference, dim=-1)[1:].double())
    rows = torch.cat(x, dim=2)
    new = torch.cat(content := random_kv(6), dim=-1)[1:].double()
    mean, spread = rows.mean(2, keepdim=True), rows.std(2, keepdim=True, correction=0)
    z, new = (rows - mean) / spread, (new - mean) / spread
    gram = z.mT @ z / rows.shape[2] + 0.3 * torch.eye(8, dtype=torch.float64)
    expected = (new * torch.linalg.solve(gram, new.mT).mT).sum(-1).mean() / 8
    assert ridge.ready(EDGE, content).leverage == pytest.approx(float(expected), rel=1e-4)


def test_leverage_tells_new_contents_from_familiar_ones():
    torch.manual_seed(0)
    ridge = Ridge()
    for _ in range(4):
        reference = random_kv(100)
        ridge.observe(EDGE, reference, drifted(reference))
    familiar, far = random_kv(50), random_kv(50)
    far = KV(far.keys * 4, far.values * 4)
    assert ridge.ready(EDGE, familiar).leverage < 1 < ridge.ready(EDGE, far).leverage
    assert ridge.ready(EDGE).leverage is None


def test_the_map_shrinks_towards_the_mean_far_from_the_examples():
    torch.manual_seed(0)
    weights, offset = affine_parts()
    ridge = Ridge(rank=8, penalty=1e-6)
    reference = random_kv(200)
    ridge.observe(EDGE, reference, affine_truth(reference, weights, offset))
    far = KV(*(part * 100 for part in random_kv(20)))
    moved = torch.cat(ridge.correct(EDGE, far), -1)[1:] - torch.cat(far, -1)[1:]
    fully = torch.cat(affine_truth(far, weights, offset), -1)[1:] - torch.cat(far, -1)[1:]
    assert moved.norm() < 0.05 * fully.norm()


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(4)), split=st.integers(0, 4), seed=st.integers(0, 99))
def test_order_and_merging_change_nothing(order, split, seed):
    torch.manual_seed(seed)
    examples = [(kv := random_kv(tokens), drifted(kv)) for tokens in (3, 17, 1, 8)]
    straight, first, second = Ridge(), Ridge(), Ridge()
    for example in examples:
        straight.observe(EDGE, *example)
    for i, index in enumerate(order):
        (first if i < split else second).observe(EDGE, *examples[index])
    first.merge(second.states)
    content = random_kv(6)
    assert first.ready(EDGE).examples == 4
    assert first.ready(EDGE, content).leverage == pytest.approx(straight.ready(EDGE, content).leverage, rel=1e-3)
    assert largest_difference(first.correct(EDGE, content), straight.correct(EDGE, content)) < 1e-3


def test_large_means_lose_nothing():
    """Keys have channels whose mean is a hundred times their spread."""
    torch.manual_seed(0)
    weights, offset = affine_parts()
    plain, moved = Ridge(penalty=0.3), Ridge(penalty=0.3)
    shift = torch.zeros(8)
    shift[0], shift[5] = 300.0, -100.0

    def shifted(kv: KV) -> KV:
        return KV(kv.keys + shift[:4], kv.values + shift[4:])

    for _ in range(4):
        reference = random_kv(50)
        truth = affine_truth(reference, weights, offset)
        plain.observe(EDGE, reference, truth)
        moved.observe(EDGE, shifted(reference), shifted(truth))
    content = random_kv(20)
    assert largest_difference(moved.correct(EDGE, shifted(content)), shifted(plain.correct(EDGE, content))) < 2e-3


def test_positions_count_from_the_segment_start():
    """A part of a content is corrected as it would be within the whole."""
    torch.manual_seed(0)
    ridge = Ridge()
    for _ in range(3):
        reference = random_kv(30)
        truth = drifted(reference)
        truth.values[1:, :, :3] += 2
        ridge.observe(EDGE, reference, truth)
    content = KV(*(0.1 * part for part in random_kv(30)))  # small: leverage below 0.8 for whole and part
    whole = ridge.correct(EDGE, content)
    part = ridge.correct(EDGE, KV(content.keys[:, :, 10:], content.values[:, :, 10:]), start=10)
    assert largest_difference(part, KV(whole.keys[:, :, 10:], whole.values[:, :, 10:])) < 1e-5


def test_state_does_not_grow():
    ridge = Ridge()
    sizes = set()
    for tokens in (1, 5, 700, 40):
        reference = random_kv(tokens)
        ridge.observe(EDGE, reference, drifted(reference))
        ridge.correct(EDGE, reference)
        sizes.add(ridge.state_bytes(EDGE))
    assert len(sizes) == 1


@pytest.mark.parametrize(("layers", "dim", "rank"), [(3, 4, 1), (3, 4, 32), (12, 8, 7), (2, 16, 32)])
def test_what_will_be_solved_counts_from_the_start(layers, dim, rank):
    """Maps are solved in the background: a budget that counted them only then would be overrun unnoticed."""
    ridge = Ridge(rank=rank)
    reference = random_kv(9, layers=layers, dim=dim)
    ridge.observe(EDGE, reference, drifted(reference))
    counted = ridge.state_bytes()
    ridge.prepare(EDGE)
    state = ridge.states[EDGE]
    held = (state.moments.mean, state.moments.scatter, *state._map, state._whitening.down, state._whitening.shift)
    assert counted == ridge.state_bytes() == sum(part.nbytes for part in held)


def test_state_is_a_twentieth_of_an_anchor_pool():
    """20 anchors of 1,000 tokens (base and delta of keys and values) at SmolLM2's shapes: 30 layers, 3 heads, 64."""
    ridge = Ridge()
    reference = random_kv(2, layers=30, heads=3, dim=64)
    ridge.observe(EDGE, reference, reference)
    ridge.correct(EDGE, reference)
    pool = 20 * 1000 * 2 * 30 * 3 * 64 * 4
    assert ridge.state_bytes() <= pool / 20


def test_a_state_given_to_another_policy_is_a_copy():
    ridge = Ridge()
    for tokens in (5, 9):
        reference = random_kv(tokens)
        ridge.observe(EDGE, reference, drifted(reference))
    loaded = Ridge()
    loaded.merge(ridge.states)
    content = random_kv(4)
    assert loaded.edges() == (EDGE,) and loaded.ready(EDGE).examples == 2
    assert largest_difference(loaded.correct(EDGE, content), ridge.correct(EDGE, content)) == 0
    reference = random_kv(3)
    loaded.observe(EDGE, reference, drifted(reference))
    assert ridge.ready(EDGE).examples == 2, "nothing is shared"


def test_the_penalty_falls_with_tokens_per_feature():
    assert [penalty_for(tokens, 100) for tokens in (0, 200, 600, 2000, 10**6)] == [3.0, 3.0, 1.0, 0.3, 0.3]


@pytest.mark.parametrize("options", [{"rank": 0}, {"penalty": 0.0}, {"max_bytes": -1}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Ridge(**options)


def test_another_models_content_is_refused():
    ridge = Ridge()
    reference = random_kv(5)
    ridge.observe(EDGE, reference, reference)
    with pytest.raises(ValueError, match="8 channels"):
        ridge.correct(EDGE, random_kv(5, dim=8))


def test_an_example_learned_in_parts_is_one_example_and_gives_the_same():
    torch.manual_seed(0)
    whole, parts = Ridge(rank=8), Ridge(rank=8)
    for tokens in (40, 33):
        reference = random_kv(tokens)
        truth = drifted(reference)
        whole.observe(EDGE, reference, truth)
        cut = lambda kv, start, end: KV(*(half[:, :, start:end] for half in kv))  # noqa: E731
        parts.observe(EDGE, cut(reference, 0, 16), cut(truth, 0, 16))
        for start in (16, 32):
            parts.observe_further(EDGE, cut(reference, start, start + 16), cut(truth, start, start + 16), start)
    content = random_kv(12)
    assert parts.ready(EDGE).examples == whole.ready(EDGE).examples == 2
    assert largest_difference(whole.correct(EDGE, content), parts.correct(EDGE, content)) < 1e-4
    parts.forget(EDGE)
    parts.observe_further(EDGE, content, content, 16)
    assert parts.ready(EDGE).examples == 0
