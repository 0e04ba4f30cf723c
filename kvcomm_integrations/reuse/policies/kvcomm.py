"""KVCOMM: corrections interpolated between stored examples. The paper we build on, kept as a choice and a yardstick."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch

from kvcomm_integrations.reuse.compression import Factors
from kvcomm_integrations.reuse.edge import Edge, Readiness
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.policies.learning import LearningPolicy, check_example

Stored: TypeAlias = torch.Tensor | Factors
"""Keys or values ``(layers, kv_heads, tokens, head_dim)``, or factors of them."""


@dataclass(eq=False)
class Anchor:
    """One example: a reference (the paper's base cache) and its correction (the paper's offset).

    Args:
        base: keys and values of the reference.
        delta: truth minus base, keys and values likewise.
        tokens: length of the example.
        uses: how many contents were predicted with it.
    """

    base: tuple[Stored, Stored]
    delta: tuple[Stored, Stored]
    tokens: int
    uses: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of base and delta."""
        return sum(part.nbytes for part in (*self.base, *self.delta))


class Pool(list[Anchor]):
    """The anchors of one edge, oldest first."""

    @property
    def nbytes(self) -> int:
        """Bytes of all anchors."""
        return sum(anchor.nbytes for anchor in self)


@dataclass
class KVCOMM(LearningPolicy[Pool]):
    """Anchors and a softmax over their distances (Ye et al., arXiv 2510.12872).

    Every example is kept as an anchor. A new content's correction is a mean of the anchors' corrections at the same
    distance from the segment's start, weighted per token by ``softmax(-distance / temperature)`` between the content's
    reference and the anchors', for keys and values apart. Distances are taken as the published code takes them: mean
    absolute difference over layers, heads and channels for the weights, and the norm over all values of the segment
    for the gate. Anchors must be at least as long as what they correct. Keys are compared and corrected before
    rotation, so that offsets of different positions are never mixed.

    Whether a content is predictable is the paper's entropy criterion: the softmax over anchors must have an entropy of
    at most ``gamma * log(anchors)``. ``ready`` reports that ratio as leverage: above 1 the content should become an
    anchor itself.

    Args:
        max_anchors (int, 20): anchors per edge (the paper's experiments).
        window (int, 5): oldest anchors among which the least used one makes room for a new one (the paper's
            update of the anchor pool).
        gamma (float, 0.3): threshold of the entropy criterion (the paper's anchor prediction).
        temperature (float, 1.0): of the softmax (the paper's offset approximation); the published code uses 1.
        top_p (float, 0.9): anchors that make up this share of the softmax count as used.
        selective (bool, False): leave out examples that the gate finds predictable, as the paper's own loop does. Off,
            every observed example is stored: what to observe is decided elsewhere.
        max_bytes (int, 1 GiB): budget for all edges; the least recently used are evicted.
    """

    name: ClassVar[str] = "kvcomm"

    max_anchors: int = 20
    window: int = 5
    gamma: float = 0.3
    temperature: float = 1.0
    top_p: float = 0.9
    selective: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("max_anchors", 1)
        self._check_range("window", 1)
        self._check_range("gamma", 0, 1)
        self._check_range("temperature", 1e-6)
        self._check_range("top_p", 0, 1)

    def observe(self, edge: Edge, reference: KV, truth: KV) -> None:
        """Store an anchor; a full pool drops the least used of its oldest ones first."""
        tokens = check_example(reference, truth)
        if tokens == 0:
            return
        pool = self._use(edge) or Pool()
        if self.selective:
            entropy = self._entropy(self._match(pool, reference.values, 0)[1])
            if entropy is not None and entropy <= 1:
                return
        while len(pool) >= self.max_anchors:
            pool.remove(min(pool[: self.window], key=lambda anchor: anchor.uses))
        keys, values = reference
        base = self._store(keys), self._store(values)
        delta = self._store(truth.keys - keys), self._store(truth.values - values)
        pool.append(Anchor(base, delta, tokens))
        self._keep(edge, pool)

    def ready(self, edge: Edge, reference: KV | None = None) -> Readiness:
        """Anchors, and for a content the entropy of its softmax over them in units of the threshold, as leverage."""
        pool = self.states.get(edge)
        if pool is None:
            return Readiness(examples=0, ready=False, reason="edge has no anchors")
        count = len(pool)
        if reference is None or reference.keys.shape[2] == 0:
            return Readiness(examples=count, ready=count > 1)
        entropy = self._entropy(self._match(pool, reference.values, 0)[1])
        if entropy is None:
            return Readiness(examples=count, ready=False, reason="fewer than two anchors are long enough")
        reason = "" if entropy <= 1 else "entropy over anchors is above the threshold"
        return Readiness(examples=count, ready=entropy <= 1, leverage=entropy, reason=reason)

    def correct(self, edge: Edge, reference: KV, start: int = 0) -> KV:
        """Reference plus the weighted correction of all anchors that are long enough; without any, the reference."""
        pool = self._use(edge)
        tokens = reference.keys.shape[2]
        if pool is None or tokens == 0:
            return reference
        anchors, covered = self._covering(pool, start, tokens)
        if not anchors:
            return reference
        part = KV(*(side[:, :, :covered] for side in reference))
        self._count_uses(*self._match(pool, part.values, start))
        corrected = [side.clone() for side in reference]
        for side, out in enumerate(corrected):
            weights = self._weights(anchors, part, start, side)  # (anchors, tokens)
            total = torch.zeros_like(part[side], dtype=torch.float32)
            for anchor, weight in zip(anchors, weights, strict=True):
                delta = _load(anchor.delta[side], start, covered)
                total.addcmul_(delta.float(), weight[:, None])
            out[1:, :, :covered] = (part[side][1:].float() + total[1:]).to(out.dtype)
        return KV(*corrected)

    def _store(self, tensor: torch.Tensor) -> Stored:
        """What is kept of keys or values ``(layers, kv_heads, tokens, head_dim)``."""
        return tensor.clone()

    def _covering(self, pool: Pool, start: int, tokens: int) -> tuple[list[Anchor], int]:
        """Anchors that reach to the content's end, and how many of its tokens they correct."""
        return [anchor for anchor in pool if anchor.tokens >= start + tokens], tokens

    def _weights(self, anchors: list[Anchor], part: KV, start: int, side: int) -> torch.Tensor:
        """Softmax over anchors for each token of the keys (side 0) or values (side 1), ``(anchors, tokens)``."""
        mine = part[side].float()
        tokens = mine.shape[2]
        distances = [
            (mine - _load(anchor.base[side], start, tokens).float()).abs().mean(dim=(0, 1, 3)) for anchor in anchors
        ]
        return torch.softmax(-torch.stack(distances) / self.temperature, dim=0)

    def _match(self, pool: Pool, values: torch.Tensor, start: int) -> tuple[list[Anchor], torch.Tensor]:
        """Anchors at least as long as a content, and the share of each in it, ``(anchors,)`` in float64.

        Shares are the softmax of the negative norms of all differences to ``values``, the content's
        ``(layers, kv_heads, tokens, head_dim)``.
        """
        tokens = values.shape[2]
        anchors = [anchor for anchor in pool if anchor.tokens >= start + tokens]
        mine = values.double()
        norms = [(mine - _load(anchor.base[1], start, tokens).double()).norm() for anchor in anchors]
        return anchors, torch.softmax(-torch.stack(norms), dim=0) if norms else mine.new_empty(0)

    def _entropy(self, share: torch.Tensor) -> float | None:
        """Entropy of shares ``(anchors,)`` in units of its threshold: up to 1 is predictable. ``None`` below two."""
        if len(share) < 2:
            return None
        threshold = self.gamma * math.log(len(share))
        entropy = float(torch.special.entr(share).sum())
        return entropy / threshold if threshold else (math.inf if entropy else 0.0)

    def _count_uses(self, anchors: list[Anchor], share: torch.Tensor) -> None:
        """Count anchors as used which make up the first ``top_p`` of a predictable content's shares ``(anchors,)``."""
        entropy = self._entropy(share)
        if entropy is None or entropy > 1:
            return
        ordered, order = share.sort(descending=True)
        count = max(1, int((ordered.cumsum(0) < self.top_p).sum()))
        for index in order[:count].tolist():
            anchors[index].uses += 1


def _load(stored: Stored, start: int, tokens: int) -> torch.Tensor:
    """Tokens ``[start, start + tokens)`` of what was stored, ``(layers, kv_heads, tokens, head_dim)``."""
    if isinstance(stored, Factors):
        return stored.tokens(start, start + tokens)
    return stored[:, :, start : start + tokens]
