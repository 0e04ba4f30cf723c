"""Moving spans between references and the paged cache: corrected and rotated on the way in, unrotated on the way out.

It obeys single orders. Who is to blame for a fault, and what then becomes of a request, is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvcomm_integrations.connector.faults import FaultSwitch, Seam
from kvcomm_integrations.connector.fused_loads import FusedLoads
from kvcomm_integrations.connector.learner import Learner
from kvcomm_integrations.connector.metadata import LoadSpan
from kvcomm_integrations.connector.paged import PagedCache
from kvcomm_integrations.reuse.policies.base import KV, Policy, is_finite
from kvcomm_integrations.reuse.references import ReferenceStore
from kvcomm_integrations.reuse.rope import Rope
from kvcomm_integrations.reuse.scratch import Scratch


class _Content(NamedTuple):
    """What the estimate of a span is made of."""

    part: KV
    """The reference's tokens, on the cache's device."""
    policy: Policy
    leverage: float | None
    positions: torch.Tensor
    """Where the keys are rotated to."""


class Mover:
    """Reads and writes the spans of one worker.

    Args:
        cache: the worker's paged cache.
        rope: the model's rotation.
        store: the worker's references.
        learner: what it has learned.
        faults: armed ones strike here.
    """

    def __init__(
        self, cache: PagedCache, rope: Rope, store: ReferenceStore, learner: Learner, faults: FaultSwitch
    ) -> None:
        self.cache = cache
        self.rope = rope
        self.fused = FusedLoads.over(cache, rope)
        """Writes estimates in one go; ``None`` where only the plain path can."""
        self._store = store
        self._learner = learner
        self._faults = faults
        self._scratch = Scratch(cache.device)

    def write(self, name: str, blocks: tuple[int, ...], span: LoadSpan) -> bool:
        """Write the estimate of a span into the paged cache.

        Args:
            name: policy.
            blocks: the sequence's block table.
            span: what goes where.

        Returns:
            whether it is numbers throughout; if not, what is there now must not be used.

        Raises:
            KeyError: the reference is not in the store.
        """
        content = self._content(name, span)
        finite = self._write_fused(content, blocks, span)
        if finite is not None:
            return finite
        for layers, kv in self._estimates(content, span):
            if not is_finite(kv):
                return False
            self.cache.write(blocks, span.start, kv, layers.start)
        return True

    def _write_fused(self, content: _Content, blocks: tuple[int, ...], span: LoadSpan) -> bool | None:
        """`write` by the kernel; ``None`` if that cannot be: faults, for one, strike between steps it does not have."""
        if self.fused is None or span.exact or self._faults.armed:
            return None
        return self.fused.write(
            content.part,
            content.policy.correction(span.edge, content.part, span.offset, content.leverage),
            content.positions,
            blocks,
            span.start,
            lambda: self._estimates(content, span),
        )

    def estimate(self, name: str, span: LoadSpan) -> KV:
        """All layers of a span as `write` would write them."""
        estimates = self._estimates(self._content(name, span), span)
        parts = [KV(kv.keys.clone(), kv.values.clone()) for _, kv in estimates]
        return KV(torch.cat([part.keys for part in parts]), torch.cat([part.values for part in parts]))

    def read(self, blocks: tuple[int, ...], start: int, end: int) -> KV:
        """Copy tokens ``[start, end)`` of a sequence, with the rotation of their keys taken off."""
        kv = self.cache.read(blocks, start, end, as_stored=True)
        positions = torch.arange(start, end, device=self.cache.device)
        if not self.cache.keys_by_channel or kv.keys.dtype != torch.float32:
            return KV(self.rope.unrotate(kv.keys, positions), kv.values)
        for layers in self._scratch.chunks(kv.keys.shape):
            self.rope.rotate_rows(kv.keys[layers].transpose(2, 3), positions, self._scratch, inverse=True)
        return kv

    def _content(self, name: str, span: LoadSpan) -> _Content:
        reference = self._store.get(span.ref_id)
        tokens = slice(span.offset, span.offset + span.end - span.start)
        # The whole of it goes to the device: a part would have to be gathered in host memory first.
        keys, values = (half.to(self.cache.device, non_blocking=True)[:, :, tokens] for half in reference.kv)
        part = self._faults.spoil(Seam.REFERENCE, KV(keys, values))
        policy = self._learner.policy(name)
        leverage = None if span.exact else self._learner.leverages.of(name, policy, span.edge, reference)
        first = span.start if policy.rotates else reference.position + span.offset
        positions = torch.arange(first, first + span.end - span.start, device=self.cache.device)
        return _Content(part, policy, leverage, positions)

    def _estimates(self, content: _Content, span: LoadSpan) -> Iterator[tuple[slice, KV]]:
        """Corrected KV of a span with keys rotated to where they belong, a few layers at a time."""
        if span.exact:
            yield slice(0, content.part.keys.shape[0]), content.part
            return
        parts = content.policy.estimates(span.edge, content.part, span.offset, self._scratch, content.leverage)
        for layers, kv in parts:
            estimate = self._faults.spoil(Seam.CORRECT, kv)
            self.rope.rotate_rows(estimate.keys.transpose(2, 3), content.positions, self._scratch)
            yield layers, estimate
