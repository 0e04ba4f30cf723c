"""What a correction policy is. One policy per file in this folder; register it in ``__init__`` and it is tested.

All keys are in the pre-RoPE frame. Tensors have shape ``(layers, kv_heads, tokens, head_dim)``, in the cache's dtype
and on its device; statistics are kept in float32 or float64. Layer 0 is never corrected (its KV depends on token and
position only): a policy must return it unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    import torch

    from kvcomm_integrations.reuse.affine import Correction
    from kvcomm_integrations.reuse.scratch import Scratch


class Edge(NamedTuple):
    """What a correction is learned for: an ordered pair of agents and the name of the placeholder.

    ``scope`` keeps tenants (and LoRA adapters, models) apart; equal edges of different scopes never share state.
    """

    source: str
    target: str
    name: str
    scope: str = ""


class KV(NamedTuple):
    """Keys (pre-RoPE) and values of a span, each ``(layers, kv_heads, tokens, head_dim)``."""

    keys: torch.Tensor
    values: torch.Tensor


def is_finite(kv: KV) -> bool:
    """Whether keys and values are numbers throughout. One sum tells: it is cheaper than a look at each."""
    import torch

    return bool(torch.isfinite(checksum(kv)))


def checksum(kv: KV) -> torch.Tensor:
    """The sum of keys and values, a scalar: finite if all of them are."""
    import torch

    return kv.keys.sum(dtype=torch.float32) + kv.values.sum(dtype=torch.float32)


@dataclass(frozen=True)
class Readiness:
    """What a policy knows about an edge, and about one content on it."""

    examples: int
    """Dense observations learned from."""
    ready: bool
    """The policy has a correction for this edge."""
    leverage: float | None = None
    """How far the content is from the examples, in units where below 0.8 is familiar and above 1 is new."""
    reason: str = ""


class Policy(ABC):
    """A way to learn and apply corrections."""

    name: ClassVar[str]
    repairs: ClassVar[bool] = True
    """The engine may run the repair pass on top of this policy."""
    rotates: ClassVar[bool] = True
    """Keys are rotated to the target position. Only ``full_share`` pastes them as they were."""
    needs_truth: ClassVar[bool] = False
    """It chooses what to recompute by looking at the true KV, so it can only be compared, not used to save time."""
    gates: ClassVar[bool] = False
    """``ready`` says whether a content may be loaded, by the entropy criterion of the policy's paper."""
    chains: ClassVar[bool] = False
    """It wants references of the agent that consumed the content just before."""
    learns: ClassVar[bool] = True
    """``observe`` does something; if not, no dense truth is ever extracted for it."""

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
