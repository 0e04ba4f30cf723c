"""The numerics of the ridge policy: what one edge has learned, the map solved from it, and how new a content is to it.

All of it is batched over layers and heads: there is no loop over either, nor over tokens. In the shapes below,
``heads`` are all KV heads of all layers from 1 on, and ``features`` is ``2 * head_dim + len(DECAYS)``.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvcomm_integrations.reuse.affine import AffineMap, Correction
from kvcomm_integrations.reuse.compression import leading_basis
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.moments import Moments

DECAYS = (2.0, 8.0, 32.0, 128.0)
"""Position features: ``exp(-t / decay)`` of the distance ``t`` from the segment's start, decays in tokens. The context
before a segment matters most at its start."""

FAMILIAR = 0.8
"""Leverage up to which the map is trusted fully."""
LEVERAGE_PENALTY = 0.3
"""Ridge penalty in the leverage, in units of a channel's variance; the same whatever the map's own penalty is."""
LEVERAGE_LAYERS = 8
LEVERAGE_TOKENS = 64
"""Leverage is a mean, which this many layers and tokens, evenly spaced, are enough to estimate."""


class Whitening(NamedTuple):
    """What turns ``[K | V]`` of a few layers into channels whose squares add up to the leverage."""

    layers: torch.Tensor
    """Indices ``(layers,)`` counted from layer 1."""
    down: torch.Tensor
    """``(layers, kv_heads, 2 * head_dim, 2 * head_dim)``, float32."""
    shift: torch.Tensor
    """``(layers, kv_heads, 1, 2 * head_dim)``, float32, subtracted after ``down``."""


@dataclass(eq=False)
class EdgeRegression:
    """Moments of rows ``[K | V | position | d_K | d_V]``, and what was solved of them.

    Args:
        layers: layers including layer 0.
        kv_heads: heads on this worker.
        head_dim: channels of a head.
        rank: rank the map is cut to, at most ``2 * head_dim``.
        examples: examples seen.
        moments: mean ``(heads, features + 2 * head_dim)``, scatter ``(heads, features, features + 2 * head_dim)``.
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
    def empty(cls, layers: int, kv_heads: int, head_dim: int, rank: int, device: torch.device) -> EdgeRegression:
        """State without examples."""
        features = 2 * head_dim + len(DECAYS)
        moments = Moments.empty((layers - 1) * kv_heads, features, features + 2 * head_dim, device)
        return cls(layers, kv_heads, head_dim, rank, 0, moments)

    def blank(self, rank: int) -> EdgeRegression:
        """State of the same shape and on the same device, without examples."""
        return self.empty(self.layers, self.kv_heads, self.head_dim, rank, self.moments.mean.device)

    @property
    def nbytes(self) -> int:
        """Bytes of moments and of what will be solved of them, counted from the start.

        Maps are solved in the background and on first use; counted only then, they would overrun a budget unnoticed.
        """
        batch, features, dim = len(self.moments.mean), self.moments.features, self.head_dim
        inner = min(self.rank, 2 * dim) + 1
        solved = batch * inner * (features + 1 + 2 * dim)
        whitening = min(self.layers - 1, LEVERAGE_LAYERS) * self.kv_heads * 2 * dim * (2 * dim + 1)
        return self.moments.nbytes + (solved + whitening) * self.moments.mean.element_size()

    def learn(self, reference: KV, truth: KV, start: int = 0) -> None:
        """Take in one example or a later part of it: KV ``(layers, kv_heads, tokens, head_dim)`` of a segment's tokens.

        Args:
            reference: keys before rotation and values of the source.
            truth: what the target computed.
            start: position of the first of them within the segment; a part that begins later is no further example.
        """
        self._check(reference)
        dim, features, tokens = self.head_dim, self.moments.features, reference.keys.shape[2]
        rows = torch.empty(self.layers - 1, self.kv_heads, tokens, features + 2 * dim, device=self.moments.mean.device)
        rows[..., :dim] = reference.keys[1:]
        rows[..., dim : 2 * dim] = reference.values[1:]
        rows[..., 2 * dim : features] = _position_features(tokens, start, rows)
        rows[..., features : features + dim] = truth.keys[1:]
        rows[..., features + dim :] = truth.values[1:]
        rows[..., features:] -= rows[..., : 2 * dim]
        with self._lock:
            self.moments.add(rows.flatten(0, 1))
            self.examples += start == 0
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
        """The map and what it needs to know of a content.

        The map is solved on first use after learning and kept. Its part of the estimate shrinks as
        ``FAMILIAR / leverage`` where the content is new; the mean correction stays.

        Args:
            reference: KV of the content, each ``(layers, kv_heads, tokens, head_dim)``.
            start: position of its first token within the segment.
            penalty: the map's ridge penalty, in units of a channel's variance.
            leverage: leverage of the content, if it is known already.
        """
        self._check(reference)
        solved = self._solved(penalty)
        leverage = self.leverage(reference) if leverage is None else leverage
        position = _position_features(reference.keys.shape[2], start, reference.keys).T
        position = torch.cat((position, torch.ones_like(position[:1])))
        return Correction(solved, position, min(1.0, FAMILIAR / max(leverage, 1e-9)))

    def leverage(self, reference: KV) -> float:
        """How new a content is: its tokens' mean ridge leverage, divided by the number of channels.

        Args:
            reference: KV of the content, each ``(layers, kv_heads, tokens, head_dim)``, at least one token.
        """
        self._check(reference)
        layers, down, shift = self._white()
        tokens = reference.keys.shape[2]
        chosen = torch.linspace(0, tokens - 1, min(tokens, LEVERAGE_TOKENS), device=down.device).long()
        at = (layers + 1)[:, None], chosen[None]
        sides = [side.transpose(1, 2)[at].transpose(1, 2).float() for side in reference]
        rows = torch.cat(sides, dim=-1)  # (layers, kv_heads, chosen, 2 * head_dim)
        return float((rows @ down - shift).square().mean())

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
        """Solve the ridge system, cut it to the rank ``r`` and fold the standardisation into it."""
        dim, features, rows = self.head_dim, self.moments.features, self.moments.rows
        mean, mean_d = self.moments.mean.split((features, 2 * dim), dim=-1)
        scale, cov = self._standardised(features)
        cross = self.moments.scatter[:, :, features:] * scale[:, :, None] / rows  # (heads, features, 2 * dim)
        cov.diagonal(dim1=-2, dim2=-1).add_(penalty)
        weights = torch.cholesky_solve(cross, torch.linalg.cholesky(cov))
        explained = weights.mT @ (cross - penalty * weights)  # (heads, 2 * dim, 2 * dim)
        basis = leading_basis((explained + explained.mT) / 2, self.rank)  # (heads, 2 * dim, r)
        down = (weights @ basis) * scale[:, :, None]
        down = torch.cat((down, -(mean[:, None] @ down)), dim=1)  # (heads, features + 1, r)
        constant = torch.zeros_like(down[:, :, :1])
        constant[:, -1] = 1
        down = torch.cat((down, constant), dim=2).mT  # (heads, r + 1, features + 1)
        up_keys, up_values = torch.cat((basis.mT, mean_d[:, None]), dim=1).split(dim, dim=-1)
        parts = (*down.split((dim, dim, features + 1 - 2 * dim), dim=2), up_keys.mT, up_values)
        return AffineMap(*(part.contiguous() for part in parts))

    def _whiten(self) -> Whitening:
        """Factor the inverse of the standardised covariance of ``[K | V]``, in evenly spaced layers."""
        channels = 2 * self.head_dim
        scale, cov = self._standardised(channels)
        layers = torch.linspace(0, self.layers - 2, min(self.layers - 1, LEVERAGE_LAYERS)).round().long().to(cov.device)

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            """``(heads, ...)`` as ``(layers, kv_heads, ...)`` of those layers."""
            return tensor.unflatten(0, (self.layers - 1, self.kv_heads))[layers]

        cov, scale, mean = pick(cov), pick(scale), pick(self.moments.mean[:, :channels])
        cov.diagonal(dim1=-2, dim2=-1).add_(LEVERAGE_PENALTY)
        factor = torch.linalg.cholesky(cov)
        down = torch.linalg.solve_triangular(factor, torch.diag_embed(scale), upper=False).mT.contiguous()
        return Whitening(layers, down, mean[..., None, :] @ down)

    def _standardised(self, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inverse spreads ``(heads, channels)`` (0 if constant), and correlations ``(heads, channels, channels)``."""
        cov = self.moments.scatter[:, :channels, :channels] / self.moments.rows
        variance = cov.diagonal(dim1=-2, dim2=-1)
        noise = 1e-10 * self.moments.mean[:, :channels].square() + torch.finfo(torch.float32).tiny
        scale = torch.where(variance > noise, variance.clamp_min(noise).rsqrt(), 0)
        return scale, cov * scale[:, :, None] * scale[:, None]

    def _check(self, reference: KV) -> None:
        layers, kv_heads, _, head_dim = reference.keys.shape
        if (layers, kv_heads, head_dim) != (self.layers, self.kv_heads, self.head_dim):
            raise ValueError(
                f"reference of {layers} layers, {kv_heads} heads and {head_dim} channels on an edge that learned from "
                f"{self.layers}, {self.kv_heads} and {self.head_dim}"
            )


def _position_features(tokens: int, start: int, like: torch.Tensor) -> torch.Tensor:
    """``(tokens, len(DECAYS))`` in float32 for tokens that begin ``start`` tokens into their segment."""
    distance = torch.arange(start, start + tokens, device=like.device, dtype=torch.float32)
    return torch.exp(-distance[:, None] / torch.tensor(DECAYS, device=like.device))
