"""The numerics of the ridge policy: what one edge has learned, the map solved from it, and how new a content is to it.

All is batched over layers and heads; there is no loop over either, nor over tokens.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from kvcomm_integrations.reuse.affine import AffineMap, Correction
from kvcomm_integrations.reuse.compression import leading_basis
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.moments import Moments

DECAYS = (2.0, 8.0, 32.0, 128.0)
"""Position features: ``exp(-t / decay)`` of the distance ``t`` from the segment's start, decays in tokens. The context
before a segment matters most at its start."""

LEVERAGE_PENALTY = 0.3
FAMILIAR = 0.8
"""Leverage up to which the map is trusted fully."""
LEVERAGE_LAYERS = 8
LEVERAGE_TOKENS = 64
"""Leverage is a mean; so many layers and tokens, evenly spaced, are enough to know it."""


@dataclass(eq=False)
class Whitening:
    """What turns ``[K | V]`` of a few layers into channels whose squares add up to the leverage.

    Args:
        layers: indices counted from layer 1.
        down: ``(layers, kv_heads, 2 head_dim, 2 head_dim)``.
        shift: ``(layers, kv_heads, 1, 2 head_dim)``, subtracted after ``down``.
    """

    layers: torch.Tensor
    down: torch.Tensor
    shift: torch.Tensor


@dataclass(eq=False)
class EdgeRegression:
    """Moments of rows ``[K | V | position | d_K | d_V]`` over layers from 1 on and heads, and what was solved of them.

    Args:
        layers: layers including layer 0.
        kv_heads: heads on this worker.
        head_dim: channels of a head.
        rank: what the map is cut to, at most.
        examples: examples seen.
        moments: batch of ``(layers - 1) * kv_heads``.
    """

    layers: int
    kv_heads: int
    head_dim: int
    rank: int
    examples: int
    moments: Moments
    _map: AffineMap | None = None
    _whitening: Whitening | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    """Guards moments and what is solved of them: maps may be solved in the background."""

    @classmethod
    def empty(cls, example: KV, rank: int) -> EdgeRegression:
        """State without examples, for KV of the example's shape and on its device."""
        layers, kv_heads, _, head_dim = example.keys.shape
        features = 2 * head_dim + len(DECAYS)
        moments = Moments.empty((layers - 1) * kv_heads, features, features + 2 * head_dim, example.keys.device)
        return cls(layers, kv_heads, head_dim, rank, 0, moments)

    def blank(self, rank: int) -> EdgeRegression:
        """State of the same shape without examples."""
        batch, features, channels = self.moments.scatter.shape
        moments = Moments.empty(batch, features, channels, self.moments.mean.device)
        return EdgeRegression(self.layers, self.kv_heads, self.head_dim, rank, 0, moments)

    @property
    def nbytes(self) -> int:
        """Bytes of moments and of what is solved of them, whether it is solved already or will be: always the same.

        Maps are solved in the background and on first use; counted only then, they would overrun a budget unnoticed.
        """
        batch, features, dim = len(self.moments.mean), self.moments.features, self.head_dim
        inner = min(self.rank, 2 * dim) + 1
        solved = batch * inner * (features + 1 + 2 * dim)
        whitening = min(self.layers - 1, LEVERAGE_LAYERS) * self.kv_heads * 2 * dim * (2 * dim + 1)
        return self.moments.nbytes + (solved + whitening) * self.moments.mean.element_size()

    def learn(self, reference: KV, truth: KV) -> None:
        """Take in one example whose first token is the segment's first."""
        self._check(reference)
        dim, features, tokens = self.head_dim, self.moments.features, reference.keys.shape[2]
        rows = torch.empty(self.layers - 1, self.kv_heads, tokens, features + 2 * dim, device=self.moments.mean.device)
        rows[..., :dim] = reference.keys[1:]
        rows[..., dim : 2 * dim] = reference.values[1:]
        rows[..., 2 * dim : features] = _position_features(tokens, 0, rows)
        rows[..., features : features + dim] = truth.keys[1:]
        rows[..., features + dim :] = truth.values[1:]
        rows[..., features:] -= rows[..., : 2 * dim]
        with self._lock:
            self.moments.add(rows.flatten(0, 1))
            self.examples += 1
            self._map = self._whitening = None

    def merge(self, other: EdgeRegression) -> None:
        """Take in all examples of another state of the same shape."""
        with self._lock:
            self.moments.merge(other.moments)
            self.examples += other.examples
            self._map = self._whitening = None

    def prepare(self, penalty: float) -> None:
        """Solve now what `correction` and `leverage` will need; may run in another thread than they do."""
        self._solved(penalty)
        self._white()

    def correction(self, reference: KV, start: int, penalty: float, leverage: float | None = None) -> Correction:
        """What makes the estimate of a content.

        The map is solved on first use after learning and kept; its part of the estimate shrinks as
        ``FAMILIAR / leverage`` where the content is new, the mean correction stays.

        Args:
            reference: ``(layers, kv_heads, tokens, head_dim)``.
            start: position of its first token within the segment.
            penalty: of the map.
            leverage: of the content, if it is known already.
        """
        self._check(reference)
        solved = self._solved(penalty)
        leverage = float(self.leverage(reference)) if leverage is None else leverage
        position = _position_features(reference.keys.shape[2], start, reference.keys).T
        position = torch.cat((position, torch.ones_like(position[:1])))
        return Correction(solved, position, min(1.0, FAMILIAR / max(leverage, 1e-9)))

    def leverage(self, reference: KV) -> torch.Tensor:
        """Mean ridge leverage of the content's tokens, divided by the number of channels; a scalar tensor."""
        self._check(reference)
        white = self._white()
        tokens = reference.keys.shape[2]
        every = torch.linspace(0, tokens - 1, min(tokens, LEVERAGE_TOKENS), device=white.down.device).long()
        at = (white.layers + 1)[:, None], every[None]
        rows = torch.cat(
            [part.transpose(1, 2)[at].transpose(1, 2).float() for part in reference],
            dim=-1,
        )
        return (rows @ white.down - white.shift).square().mean()

    def _solved(self, penalty: float) -> AffineMap:
        with self._lock:
            if self._map is None:
                self._map = self._solve(penalty)
            return self._map

    def _white(self) -> Whitening:
        with self._lock:
            if self._whitening is None:
                self._whitening = self._whiten()
            return self._whitening

    def _solve(self, penalty: float) -> AffineMap:
        """Solve the ridge system, cut it to the rank and fold the standardisation into it."""
        dim, features, rows = self.head_dim, self.moments.features, self.moments.rows
        mean, mean_d = self.moments.mean.split((features, 2 * dim), dim=-1)
        scale, cov = self._standardised(features)
        cross = self.moments.scatter[:, :, features:] * scale[:, :, None] / rows
        cov.diagonal(dim1=-2, dim2=-1).add_(penalty)
        weights = torch.cholesky_solve(cross, torch.linalg.cholesky(cov))
        explained = weights.mT @ (cross - penalty * weights)
        basis = leading_basis((explained + explained.mT) / 2, self.rank)
        down = (weights @ basis) * scale[:, :, None]
        down = torch.cat((down, -(mean[:, None] @ down)), dim=1)
        constant = torch.zeros_like(down[:, :, :1])
        constant[:, -1] = 1
        down = torch.cat((down, constant), dim=2).mT
        up_keys, up_values = torch.cat((basis.mT, mean_d[:, None]), dim=1).split(dim, dim=-1)
        parts = (*down.split((dim, dim, features + 1 - 2 * dim), dim=2), up_keys.mT, up_values)
        return AffineMap(*(part.contiguous() for part in parts))

    def _whiten(self) -> Whitening:
        channels = 2 * self.head_dim
        scale, cov = self._standardised(channels)
        layers = torch.linspace(0, self.layers - 2, min(self.layers - 1, LEVERAGE_LAYERS)).round().long()
        layers = layers.to(cov.device)

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.unflatten(0, (self.layers - 1, self.kv_heads))[layers]

        cov, scale, mean = pick(cov), pick(scale), pick(self.moments.mean[:, :channels])
        cov.diagonal(dim1=-2, dim2=-1).add_(LEVERAGE_PENALTY)
        factor = torch.linalg.cholesky(cov)
        down = torch.linalg.solve_triangular(factor, torch.diag_embed(scale), upper=False).mT.contiguous()
        return Whitening(layers, down, mean[..., None, :] @ down)

    def _standardised(self, features: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inverse spreads ``(heads, features)`` (0 for constant channels) and the features' correlations."""
        cov = self.moments.scatter[:, :features, :features] / self.moments.rows
        variance = cov.diagonal(dim1=-2, dim2=-1)
        noise = 1e-10 * self.moments.mean[:, :features].square() + torch.finfo(torch.float32).tiny
        scale = torch.where(variance > noise, variance.clamp_min(noise).rsqrt(), 0)
        return scale, cov * scale[:, :, None] * scale[:, None]

    def _check(self, reference: KV) -> None:
        layers, kv_heads, _, head_dim = reference.keys.shape
        if (layers, kv_heads, head_dim) != (self.layers, self.kv_heads, self.head_dim):
            raise ValueError(
                f"reference of {layers} layers, {kv_heads} heads and {head_dim} channels on an edge that learned from "
                f"{self.layers}, {self.kv_heads} and {self.head_dim}"
            )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything learned, for saving."""
        counts = (self.layers, self.kv_heads, self.head_dim, self.examples, self.moments.rows)
        return {"counts": torch.tensor(counts), "mean": self.moments.mean, "scatter": self.moments.scatter}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor], rank: int) -> EdgeRegression:
        """The state that ``tensors`` was called on, as a copy."""
        layers, kv_heads, head_dim, examples, rows = tensors["counts"].tolist()
        scatter = tensors["scatter"].clone()
        moments = Moments(scatter.shape[1], rows, tensors["mean"].clone(), scatter)
        return cls(layers, kv_heads, head_dim, rank, examples, moments)


def _position_features(tokens: int, start: int, like: torch.Tensor) -> torch.Tensor:
    """``(tokens, len(DECAYS))`` for tokens that begin ``start`` tokens after their segment."""
    distance = torch.arange(start, start + tokens, device=like.device, dtype=torch.float32)
    return torch.exp(-distance[:, None] / torch.tensor(DECAYS, device=like.device))
