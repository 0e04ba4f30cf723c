"""Which rotation a model uses, read from its transformers configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from kvcomm_integrations.errors import UnsupportedModelError

INTERLEAVED_MODEL_TYPES = frozenset({"gptj", "codegen", "glm", "glm4", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe"})
"""Models that rotate neighbouring channels (GPT-J style); all others rotate the two halves of a head (NeoX style)."""

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def read_rotation(config: Any) -> tuple[torch.Tensor, bool, float, int | None]:
    """What `Rope` is made of, from a configuration of either generation of transformers.

    Returns:
        ``inv_freq`` ``(rotary_dim / 2,)`` in float32, ``interleaved``, ``scale`` and ``max_position``.

    Raises:
        UnsupportedModelError: see `Rope.from_hf_config`.
    """
    model_type = getattr(config, "model_type", "?")
    _refuse_other_positions(config, model_type)
    params = _rope_parameters(config, model_type)
    rope_type = _rope_type(params)
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise _unsupported(model_type, f"RoPE type {rope_type!r}")
    interleaved = model_type in INTERLEAVED_MODEL_TYPES or bool(getattr(config, "original_rope", False))
    dim = _rotary_dim(config, params)
    inv_freq, scale = _frequencies(rope_type, params, dim, config)
    limit = getattr(config, "max_position_embeddings", None) if rope_type == "dynamic" else None
    return inv_freq, interleaved, scale, limit


def _unsupported(model_type: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model type {model_type!r} uses {what}, whose keys cannot be moved yet (supported: "
        f"{', '.join(SUPPORTED_ROPE_TYPES)}): serve it with reuse switched off (enabled=False)"
    )


def _refuse_other_positions(config: Any, model_type: str) -> None:
    """Raise if positions are encoded otherwise than by one rotation common to all layers."""
    if getattr(config, "kv_lora_rank", None):
        raise _unsupported(model_type, "multi-head latent attention")
    if getattr(config, "alibi", False):
        raise _unsupported(model_type, "ALiBi positions")
    if any(not rotated for rotated in getattr(config, "no_rope_layers", None) or ()):
        raise _unsupported(model_type, "layers without RoPE")


def _rope_parameters(config: Any, model_type: str) -> dict[str, Any]:
    """The configuration's RoPE settings as one flat dict with ``rope_theta``, whichever transformers wrote it."""
    params = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if any(isinstance(value, Mapping) for value in params.values()):
        raise _unsupported(model_type, "a rotation that differs between layers")
    params = dict(params)
    if params.get("rope_theta") is None:
        params["rope_theta"] = _theta(config, model_type)
    return params


def _rope_type(params: Mapping[str, Any]) -> str:
    if "mrope_section" in params:
        return "mrope"
    return "fope" if params.get("use_fope") else params.get("rope_type") or params.get("type") or "default"


def _theta(config: Any, model_type: str) -> float:
    for name in ("rope_theta", "rotary_emb_base"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    if model_type in ("chatglm", "gptj", "codegen"):
        return 10000.0 * float(getattr(config, "rope_ratio", 1.0))
    raise _unsupported(model_type, "no rotary embedding named in its configuration")


def _rotary_dim(config: Any, params: Mapping[str, Any]) -> int:
    """Rotated channels per head."""
    head_dim = getattr(config, "head_dim", None) or getattr(config, "kv_channels", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    explicit = params.get("rope_dim") or getattr(config, "rotary_dim", None)
    if explicit:
        return int(explicit)
    factor = params.get("partial_rotary_factor")
    for name in ("partial_rotary_factor", "rotary_pct"):
        factor = getattr(config, name, None) if factor is None else factor
    if factor is None:
        factor = 0.5 if getattr(config, "model_type", "") == "chatglm" else 1.0
    return int(head_dim * factor)


def _frequencies(rope_type: str, params: Mapping[str, Any], dim: int, config: Any) -> tuple[torch.Tensor, float]:
    """Frequencies ``(dim / 2,)`` in float32 and the factor on cosines and sines."""
    theta = float(params["rope_theta"])
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    if rope_type == "dynamic":
        theta *= _ntk_stretch(params, dim, config)
    plain = 1.0 / theta**exponents
    if rope_type == "linear":
        return plain / float(params["factor"]), 1.0
    if rope_type == "llama3":
        return _llama3(plain, params), 1.0
    if rope_type == "yarn":
        return _yarn(plain, params, dim, config)
    return plain, 1.0


def _ntk_stretch(params: Mapping[str, Any], dim: int, config: Any) -> float:
    """NTK-aware factor on the base, fixed at the longest length served as engines do (1 at the trained length)."""
    exponent = dim / (dim - 2)
    if "alpha" in params:
        return float(params["alpha"]) ** exponent
    factor, longest = float(params["factor"]), config.max_position_embeddings
    stretch = factor * longest / params.get("max_trained_positions", longest) - (factor - 1)
    return float(stretch) ** exponent


def _llama3(plain: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1, on frequencies ``(dim / 2,)``: slow ones are slowed by ``factor``, fast ones kept, others blended."""
    factor = float(params["factor"])
    low, high = float(params["low_freq_factor"]), float(params["high_freq_factor"])
    turns = params["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns >= low).float()
    return plain * (keep + (1 - keep) / factor)


def _yarn(plain: torch.Tensor, params: Mapping[str, Any], dim: int, config: Any) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): frequencies ``(dim / 2,)`` from kept to slowed, and a factor on cosines and sines."""
    theta = float(params["rope_theta"])
    original = params.get("original_max_position_embeddings") or config.max_position_embeddings
    factor = float(params.get("factor") or config.max_position_embeddings / original)

    def channel(turns: float) -> float:
        """Index of the channel that turns so many times within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(params.get("beta_fast") or 32), channel(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / ((last - first) or 0.001)
    slowed = ramp.clamp(0, 1)
    return plain * (1 - slowed + slowed / factor), _yarn_attention_factor(params, factor)


def _yarn_attention_factor(params: Mapping[str, Any], factor: float) -> float:
    """The factor on cosines and sines, as the configuration gives it or YaRN computes it."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return magnitude(params["mscale"]) / magnitude(params["mscale_all_dim"])
    return magnitude(1.0)
