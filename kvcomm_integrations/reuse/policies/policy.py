"""What a correction policy is. One policy per file in this folder, with an entry in ``reuse.traits``.

All keys are in the pre-RoPE frame. Tensors have shape ``(layers, kv_heads, tokens, head_dim)``, in the cache's dtype
and on its device; statistics are kept in float32 or float64. Layer 0 is never corrected (its KV depends on token and
position only): a policy must return it unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch

from kvcomm_integrations.reuse.affine import Correction
from kvcomm_integrations.reuse.edge import Edge, Readiness
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.scratch import Scratch
from kvcomm_integrations.reuse.traits import POLICIES, PolicyTraits


class Policy(ABC):
    """A way to learn and apply corrections."""

    name: ClassVar[str]
    """Its key in ``reuse.traits.POLICIES``."""

    @property
    def traits(self) -> PolicyTraits:
        """What distinguishes it for whoever plans with it."""
        return POLICIES[self.name]

    @abstractmethod
    def observe(self, edge: Edge, reference: KV, truth: KV) -> None:
        """Learn from a dense prefill: ``truth`` is what the target really computed for ``reference``'s tokens."""

    @abstractmethod
    def ready(self, edge: Edge, reference: KV | None = None) -> Readiness:
        """What is known about the edge and, given a content, how familiar it is."""

    @abstractmethod
    def correct(self, edge: Edge, reference: KV, start: int = 0) -> KV:
        """The estimate of the target's KV for ``reference``. An unknown edge returns the reference unchanged.

        ``start`` is the position of the reference's first token within its segment (non-zero when only a part is
        loaded), for policies that use position features.
        """

    def estimates(
        self, edge: Edge, reference: KV, start: int, scratch: Scratch, leverage: float | None = None
    ) -> Iterator[tuple[slice, KV]]:
        """`correct`, a few layers at a time, without a tensor of all of them.

        Args:
            edge, reference, start: as for `correct`.
            scratch: where estimates are made.
            leverage: what `ready` has said of the content, if it was asked before.

        Yields:
            layers and their estimate in float32, keys as a view of memory ordered channel by channel. It belongs to
            the caller until the next is asked for.
        """
        yield from scratch.copies(self.correct(edge, reference, start))

    def correction(self, edge: Edge, reference: KV, start: int = 0, leverage: float | None = None) -> Correction | None:
        """The correction as an affine map of each token, if it is one; a GPU applies it while it copies.

        Args:
            edge, reference, start, leverage: as for `estimates`.

        Returns:
            ``None``: ask `estimates`.
        """
        return None

    def prepare(self, edge: Edge) -> None:  # noqa: B027 - a hook that few policies need
        """Compute ahead what `correct` and `ready` will need; may be called from another thread than they are."""

    def select(self, estimate: torch.Tensor, truth: torch.Tensor) -> torch.Tensor | None:
        """Tokens to recompute, given estimated and true keys of layer 1 ``(kv_heads, tokens, head_dim)``.

        Returns:
            indices ``(count,)``, or ``None``: this policy recomputes none.
        """
        return None

    @abstractmethod
    def state_bytes(self, edge: Edge | None = None) -> int:
        """Bytes of learned state, of one edge or of all."""

    @abstractmethod
    def forget(self, edge: Edge) -> None:
        """Drop what was learned for an edge; unknown edges are ignored."""

    @abstractmethod
    def edges(self) -> tuple[Edge, ...]:
        """Edges with learned state, least recently used first."""
