"""Rotary position embedding of cached keys: put on, take off, move. Knows nothing of engines, agents or policies.

Keys are stored without their rotation (the pre-RoPE frame) and rotated to wherever they are pasted. Which rotation a
model uses is read from its configuration; whether that is true is checked on real keys (`Rope.self_check`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcomm_integrations.errors import UnsupportedModelError
from kvcomm_integrations.reuse.scratch import Scratch

INTERLEAVED_MODEL_TYPES = frozenset({"gptj", "codegen", "glm", "glm4", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe"})
"""Models that rotate neighbouring channels (GPT-J style); all others rotate the two halves of a head (NeoX style)."""

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, eq=False)
class Rope:
    """A model's rotation: channel pair ``i`` turns by ``position * inv_freq[i]`` (RoFormer, arXiv 2104.09864).

    Args:
        inv_freq: angular frequencies in radians per token, ``(rotary_dim / 2,)``, float32.
        interleaved: pairs are neighbouring channels (GPT-J) instead of the two halves of the rotary part (NeoX).
        scale: YaRN's attention factor (arXiv 2309.00071); engines fold it into cosines and sines, so a
            rotated key is longer than the plain one by this factor, and taking the rotation off divides by it.
        max_position: positions from here on cannot be rotated, ``None`` for no limit. Dynamic NTK has one: beyond the
            trained length its frequencies depend on the length of the whole sequence.
        table_dtype: type the engine rounds cosines and sines to before use. Set it to the model's type to undo an
            engine's rotation exactly rather than to that type's rounding.
    """

    inv_freq: torch.Tensor
    interleaved: bool = False
    scale: float = 1.0
    max_position: int | None = None
    table_dtype: torch.dtype = torch.float32
    _on_device: dict[torch.device, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated, counted from the first; the rest is left alone."""
        return 2 * len(self.inv_freq)

    @classmethod
    def from_hf_config(
        cls, config: Any, interleaved: bool | None = None, table_dtype: torch.dtype = torch.float32
    ) -> Rope:
        """Read the rotation from a transformers configuration of either generation.

        Args:
            config: the text model's configuration (``rope_parameters``, or ``rope_theta`` and ``rope_scaling``).
            interleaved: overrides what is known about the model type (GGUF weights may need it).
            table_dtype: see the class.

        Raises:
            UnsupportedModelError: no rotary embedding, latent attention, a rotation that differs between layers, or
                a RoPE type that is not implemented.
        """
        model_type = getattr(config, "model_type", "?")
        _refuse_other_positions(config, model_type)
        params = _rope_parameters(config, model_type)
        rope_type = params.get("rope_type") or params.get("type") or "default"
        if "mrope_section" in params or rope_type == "mrope":
            raise _unsupported(model_type, "RoPE type 'mrope'")
        if rope_type not in SUPPORTED_ROPE_TYPES:
            raise _unsupported(model_type, f"RoPE type {rope_type!r}")
        if params.get("use_fope"):
            raise _unsupported(model_type, "RoPE type 'fope'")
        if interleaved is None:
            interleaved = model_type in INTERLEAVED_MODEL_TYPES or bool(getattr(config, "original_rope", False))
        dim = _rotary_dim(config, params)
        inv_freq, scale = _frequencies(rope_type, params, dim, config)
        limit = getattr(config, "max_position_embeddings", None) if rope_type == "dynamic" else None
        return cls(inv_freq, interleaved, scale, limit, table_dtype)

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines at ``positions`` ``(tokens,)``: two float32 tensors ``(tokens, rotary_dim / 2)``.

        They are computed anew each time: for a few thousand tokens that takes less than looking them up would save.

        Raises:
            UnsupportedModelError: a position beyond ``max_position``.
        """
        if self.max_position is not None and positions.numel() and int(positions.max()) >= self.max_position:
            raise UnsupportedModelError(
                f"position {int(positions.max())} is beyond the {self.max_position} up to which dynamic NTK scaling "
                "keeps its frequencies: limit max_model_len to that, or switch reuse off"
            )
        angles = positions.to(torch.float32)[:, None] * self._frequencies_on(positions.device)
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        if self.table_dtype != torch.float32:
            cos, sin = cos.to(self.table_dtype).float(), sin.to(self.table_dtype).float()
        return cos, sin

    def rotate(self, keys: torch.Tensor, positions: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        """Rotate plain keys to ``positions``, or (``inverse``) take the rotation of ``positions`` off.

        Args:
            keys: ``(..., tokens, head_dim)``, usually ``(layers, kv_heads, tokens, head_dim)``, any float type.
            positions: ``(tokens,)`` integers on the keys' device.

        Returns:
            A new tensor like ``keys``; computed in float32. Channels beyond ``rotary_dim`` are copied.
        """
        if keys.shape[-2] != len(positions):
            raise ValueError(f"{keys.shape[-2]} keys cannot be rotated to {len(positions)} positions")
        if keys.shape[-1] < self.rotary_dim:
            raise ValueError(f"heads of {keys.shape[-1]} channels have no {self.rotary_dim} rotary ones")
        cos, sin = self._turns(positions, inverse)
        first, second = self._pairs
        a, b = keys[..., first].float(), keys[..., second].float()
        out = torch.empty_like(keys)
        out[..., first] = torch.addcmul(a * cos, b, sin, value=-1)
        out[..., second] = torch.addcmul(a * sin, b, cos)
        out[..., self.rotary_dim :] = keys[..., self.rotary_dim :]
        return out

    def rotate_rows(
        self, rows: torch.Tensor, positions: torch.Tensor, scratch: Scratch, inverse: bool = False
    ) -> torch.Tensor:
        """`rotate` in place, for float32 keys that lie channel by channel.

        Args:
            rows: ``(..., head_dim, tokens)``, the last dimension contiguous.
            positions: ``(tokens,)`` on the keys' device.
            scratch: working memory.
            inverse: take the rotation off.

        Returns:
            ``rows``.
        """
        cos, sin = (part.T.contiguous() for part in self._turns(positions, inverse))
        first, second = self._pairs
        a, b = rows[..., first, :], rows[..., second, :]
        turned = torch.mul(a, sin, out=scratch.take("turned", *a.shape)).addcmul_(b, cos)
        a.mul_(cos).addcmul_(b, sin, value=-1)
        b.copy_(turned)
        return rows

    @property
    def _pairs(self) -> tuple[slice, slice]:
        """First and second channels of all pairs."""
        if self.interleaved:
            return slice(0, self.rotary_dim, 2), slice(1, self.rotary_dim, 2)
        return slice(0, len(self.inv_freq)), slice(len(self.inv_freq), self.rotary_dim)

    def _turns(self, positions: torch.Tensor, inverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines that put the rotation on or take it off, each ``(tokens, rotary_dim / 2)``."""
        cos, sin = self.cos_sin(positions)
        if not inverse:
            return cos, sin
        length = cos.square() + sin.square()
        return cos / length, -sin / length

    def unrotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Take the rotation of ``positions`` off cached keys; the inverse of `rotate`."""
        return self.rotate(keys, positions, inverse=True)

    def self_check(
        self, k_a: torch.Tensor, pos_a: torch.Tensor, k_b: torch.Tensor, pos_b: torch.Tensor, tol: float
    ) -> bool:
        """Whether cached layer-0 keys of equal tokens agree once their rotations are taken off.

        Layer 0's keys depend on token and position only, so this holds for every model whose rotation is this one,
        and needs no knowledge of the model. Use pairs at different positions: equal ones agree under any rotation.

        Args:
            k_a, k_b: ``(..., tokens, head_dim)``; token ``i`` of both is the same token.
            pos_a, pos_b: ``(tokens,)``, where each was cached.
            tol: greatest difference, relative to the largest channel.
        """
        plain_a, plain_b = self.unrotate(k_a.float(), pos_a), self.unrotate(k_b.float(), pos_b)
        if not plain_a.numel():
            return True
        size = float(plain_a.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
        return float((plain_a - plain_b).abs().max()) <= tol * size

    def _frequencies_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._on_device:
            self._on_device[device] = self.inv_freq.to(device)
        return self._on_device[device]


def _unsupported(model_type: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model type {model_type!r} uses {what}, whose keys cannot be moved yet (supported: "
        f"{', '.join(SUPPORTED_ROPE_TYPES)}): serve it with reuse switched off (enabled=False)"
    )


def _refuse_other_positions(config: Any, model_type: str) -> None:
    """Raise where positions are not (only) one rotation common to all layers."""
    if getattr(config, "kv_lora_rank", None):
        raise _unsupported(model_type, "multi-head latent attention")
    if getattr(config, "alibi", False):
        raise _unsupported(model_type, "ALiBi positions")
    if any(not rotated for rotated in getattr(config, "no_rope_layers", None) or ()):
        raise _unsupported(model_type, "layers without RoPE")


def _rope_parameters(config: Any, model_type: str) -> dict[str, Any]:
    """The configuration's RoPE settings as one flat dict with ``rope_theta``, whatever transformers wrote it."""
    params = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if any(isinstance(value, Mapping) for value in params.values()):
        raise _unsupported(model_type, "a rotation that differs between layers")
    params = dict(params)
    if params.get("rope_theta") is None:
        params["rope_theta"] = _theta(config, model_type)
    return params


def _theta(config: Any, model_type: str) -> float:
    for name in ("rope_theta", "rotary_emb_base"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    if model_type in ("chatglm", "gptj", "codegen"):
        return 10000.0 * float(getattr(config, "rope_ratio", 1.0))
    raise _unsupported(model_type, "no rotary embedding that its configuration tells of")


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
    """NTK-aware growth of the base at the longest length served, which is how engines fix it (1 at the trained one)."""
    exponent = dim / (dim - 2)
    if "alpha" in params:
        return float(params["alpha"]) ** exponent
    factor, longest = float(params["factor"]), config.max_position_embeddings
    stretch = factor * longest / params.get("max_trained_positions", longest) - (factor - 1)
    return float(stretch) ** exponent


def _llama3(plain: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: slow channels are slowed by ``factor``, fast ones kept, those between blended."""
    factor = float(params["factor"])
    low, high = float(params["low_freq_factor"]), float(params["high_freq_factor"])
    turns = params["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns >= low).float()
    return plain * (keep + (1 - keep) / factor)


def _yarn(plain: torch.Tensor, params: Mapping[str, Any], dim: int, config: Any) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): a ramp between kept and slowed channels, and a factor on the attention's temperature."""
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
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return magnitude(params["mscale"]) / magnitude(params["mscale_all_dim"])
    return magnitude(1.0)
