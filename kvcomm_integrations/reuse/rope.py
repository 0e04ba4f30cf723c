"""Rotary position embedding of cached keys: put it on, take it off.

Keys are stored without their rotation (the pre-RoPE frame) and rotated to wherever they are pasted.
`Rope.self_check` tells on real keys whether a rotation is the model's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvcomm_integrations.errors import UnsupportedModelError
from kvcomm_integrations.reuse.rope_config import read_rotation
from kvcomm_integrations.reuse.scratch import Scratch


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
        inv_freq, neighbours, scale, limit = read_rotation(config)
        interleaved = neighbours if interleaved is None else interleaved
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
        device = positions.device
        if device not in self._on_device:
            self._on_device[device] = self.inv_freq.to(device)
        angles = positions.to(torch.float32)[:, None] * self._on_device[device]
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        if self.table_dtype != torch.float32:
            cos, sin = cos.to(self.table_dtype).float(), sin.to(self.table_dtype).float()
        return cos, sin

    def rotate(self, keys: torch.Tensor, positions: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        """Rotate plain keys to ``positions``, or (``inverse``) take the rotation of ``positions`` off.

        Args:
            keys: ``(..., tokens, head_dim)``, usually ``(layers, kv_heads, tokens, head_dim)``, any float type.
            positions: ``(tokens,)`` integers on the keys' device.
            inverse: take the rotation off.

        Returns:
            a new tensor of the keys' shape and type, computed in float32. Channels beyond ``rotary_dim`` are copied.
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
            ``rows`` itself.
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
        """Take the rotation of ``positions`` ``(tokens,)`` off keys ``(..., tokens, head_dim)``; `rotate` inverted."""
        return self.rotate(keys, positions, inverse=True)

    def self_check(
        self, k_a: torch.Tensor, pos_a: torch.Tensor, k_b: torch.Tensor, pos_b: torch.Tensor, tol: float
    ) -> bool:
        """Whether cached layer-0 keys of equal tokens agree once their rotations are taken off.

        Layer 0's keys depend on token and position only, so they agree in every model whose rotation is this one.
        Compare different positions: at equal ones keys agree under any rotation.

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
