"""Rotation against transformers' own embedding, independent formulas and its invariants."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPTJConfig, GPTNeoXConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvcomm_integrations.errors import UnsupportedModelError
from kvcomm_integrations.reuse.rope import Rope

SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
}


def llama(scaling: dict[str, object]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 10000.0, **scaling},
    )


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_equals_transformers(scaling):
    config = llama(scaling)
    rope = Rope.from_hf_config(config)
    positions = torch.tensor([0, 1, 17, 300, 1999])
    keys = torch.randn(3, 2, len(positions), 64)
    cos, sin = LlamaRotaryEmbedding(config)(keys, positions[None])
    expected = apply_rotary_pos_emb(keys, keys, cos, sin)[1]
    torch.testing.assert_close(rope.rotate(keys, positions), expected, atol=3e-4, rtol=1e-5)
    torch.testing.assert_close(rope.unrotate(expected, positions), keys, atol=3e-4, rtol=1e-5)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_old_and_new_configurations_mean_the_same(scaling):
    new = Rope.from_hf_config(llama(scaling))
    old = SimpleNamespace(
        model_type="llama",
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        rope_scaling={("type" if key == "rope_type" else key): value for key, value in scaling.items()},
    )
    assert torch.equal(Rope.from_hf_config(old).inv_freq, new.inv_freq)
    assert Rope.from_hf_config(old).scale == new.scale


def rotate_pairs(keys: torch.Tensor, position: int, pairs: list[tuple[int, int]], dim: int, theta: float):
    """Rotate one token's channel pairs, one at a time, with Python's own trigonometry."""
    out = keys.clone()
    for i, (a, b) in enumerate(pairs):
        angle = position * theta ** (-2 * i / dim)
        c, s = math.cos(angle), math.sin(angle)
        out[..., a] = keys[..., a] * c - keys[..., b] * s
        out[..., b] = keys[..., b] * c + keys[..., a] * s
    return out


def test_gptj_rotates_neighbours_of_the_rotary_part():
    rope = Rope.from_hf_config(GPTJConfig(n_embd=64, n_head=2, rotary_dim=16))
    keys = torch.randn(1, 2, 1, 32)
    expected = rotate_pairs(keys, 37, [(2 * i, 2 * i + 1) for i in range(8)], 16, 10000.0)
    torch.testing.assert_close(rope.rotate(keys, torch.tensor([37])), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(rope.rotate(keys, torch.tensor([37]))[..., 16:], keys[..., 16:])


def test_neox_rotates_halves_of_the_rotary_part():
    config = GPTNeoXConfig(hidden_size=64, num_attention_heads=2, rotary_pct=0.25, rotary_emb_base=5000)
    config.rope_parameters = {"rope_theta": 5000.0, "rope_type": "default", "partial_rotary_factor": 0.25}
    rope = Rope.from_hf_config(config)
    keys = torch.randn(1, 2, 1, 32)
    expected = rotate_pairs(keys, 37, [(i, i + 4) for i in range(4)], 8, 5000.0)
    torch.testing.assert_close(rope.rotate(keys, torch.tensor([37])), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["gptj", "glm4", "cohere2", "ernie4_5"])
def test_interleaved_models_are_known_and_may_be_overruled(model_type):
    config = SimpleNamespace(model_type=model_type, hidden_size=64, num_attention_heads=2, rope_theta=1e4)
    assert Rope.from_hf_config(config).interleaved
    assert not Rope.from_hf_config(config, interleaved=False).interleaved


@settings(max_examples=25, deadline=None)
@given(
    positions=st.lists(st.integers(0, 4000), max_size=5),
    interleaved=st.booleans(),
    head_dim=st.sampled_from([8, 10, 16]),
    scale=st.sampled_from([1.0, 1.2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_unrotate_undoes_rotate(positions, interleaved, head_dim, scale, dtype):
    rope = Rope(1e4 ** -(torch.arange(4) / 4), interleaved, scale)
    keys = torch.randn(2, 1, len(positions), head_dim).to(dtype)
    where = torch.tensor(positions, dtype=torch.long)
    back = rope.unrotate(rope.rotate(keys, where), where)
    assert back.dtype == dtype
    torch.testing.assert_close(back.float(), keys.float(), atol=8 * torch.finfo(dtype).eps, rtol=1e-2)


@settings(max_examples=25, deadline=None)
@given(a=st.integers(0, 900), b=st.integers(0, 900), shift=st.integers(0, 900))
def test_scores_depend_on_distance_only(a, b, shift):
    rope = Rope.from_hf_config(llama(SCALINGS["llama3"]))
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)

    def score(p: int, r: int) -> float:
        return float((rope.rotate(q, torch.tensor([p])) * rope.rotate(k, torch.tensor([r]))).sum())

    assert score(a, b) == pytest.approx(score(a + shift, b + shift), abs=5e-3)


def test_self_check_tells_a_wrong_rotation():
    rope = Rope.from_hf_config(llama(SCALINGS["yarn"]))
    plain = torch.randn(1, 2, 6, 64)
    pos_a, pos_b = torch.arange(6), torch.arange(6) + 91
    k_a, k_b = rope.rotate(plain, pos_a), rope.rotate(plain, pos_b)
    assert rope.self_check(k_a, pos_a, k_b, pos_b, tol=1e-5)
    for wrong in (Rope(rope.inv_freq, interleaved=True), Rope(rope.inv_freq * 1.01), Rope(rope.inv_freq[:16])):
        assert not wrong.self_check(k_a, pos_a, k_b, pos_b, tol=1e-2)
    empty = torch.zeros(0, dtype=torch.long)
    assert rope.self_check(k_a[:, :, :0], empty, k_b[:, :, :0], empty, tol=0)


def test_a_rounded_table_is_undone_exactly():
    rounded = Rope.from_hf_config(llama(SCALINGS["default"]), table_dtype=torch.bfloat16)
    keys, positions = torch.randn(1, 1, 4, 64), torch.arange(4) * 100
    torch.testing.assert_close(rounded.unrotate(rounded.rotate(keys, positions), positions), keys, atol=1e-5, rtol=1e-5)
    exact = Rope.from_hf_config(llama(SCALINGS["default"]))
    assert (exact.rotate(keys, positions) - rounded.rotate(keys, positions)).abs().max() > 1e-3


BASE = {"model_type": "strange", "hidden_size": 64, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [8, 4, 4]}}, "mrope"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}}, "mrope"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "use_fope": True}}, "fope"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differs between layers"),
        ({"rope_theta": 1e4, "no_rope_layers": [1, 1, 0]}, "layers without RoPE"),
        ({"rope_theta": 1e4, "kv_lora_rank": 512}, "latent attention"),
        ({"rope_theta": 1e4, "alibi": True}, "ALiBi"),
        ({}, "no rotary embedding"),
    ],
)
def test_unknown_rotations_are_refused_by_name(fields, named):
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        Rope.from_hf_config(SimpleNamespace(**BASE, **fields))
    assert "strange" in str(caught.value) and "enabled=False" in str(caught.value)


def test_dynamic_scaling_is_refused_beyond_the_trained_length():
    rope = Rope.from_hf_config(llama(SCALINGS["dynamic"]))
    with pytest.raises(UnsupportedModelError, match="2048"):
        rope.cos_sin(torch.tensor([2048]))


def test_shapes_that_do_not_fit_are_named():
    rope = Rope(torch.ones(4))
    with pytest.raises(ValueError, match="3 keys"):
        rope.rotate(torch.zeros(1, 1, 3, 8), torch.arange(2))
    with pytest.raises(ValueError, match="heads of 4"):
        rope.rotate(torch.zeros(1, 1, 2, 4), torch.arange(2))
