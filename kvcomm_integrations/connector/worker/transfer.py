"""Moving spans between references and the paged cache: corrected and rotated on the way in, unrotated on the way out.

It obeys single orders. Who is to blame for a fault, and what then becomes of a request, is not known here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvcomm_integrations.connector.worker.fault_injection import FaultInjector, InjectionPoint
from kvcomm_integrations.connector.worker.learner import Learner
from kvcomm_integrations.connector.worker.paged_cache import Layout, Packing, PagedCache
from kvcomm_integrations.planning.jobs import HarvestJob, LoadSpan
from kvcomm_integrations.reuse.affine import Correction
from kvcomm_integrations.reuse.fused import BlockForm, FusedCache, Half, available
from kvcomm_integrations.reuse.kv import KV, is_finite
from kvcomm_integrations.reuse.policies.policy import Policy
from kvcomm_integrations.reuse.references import ReferenceStore
from kvcomm_integrations.reuse.rope import Rope
from kvcomm_integrations.reuse.scratch import Scratch
from kvcomm_integrations.reuse.transfers import Arriving, ToHost, to_device

PATIENCE = 16
"""Steps after which a copy is waited for: well before the scheduler would take it for lost."""


@dataclass
class _Expected:
    job: HarvestJob
    arriving: Arriving
    asked: int = 0


class Arrivals:
    """What is on its way, in the order of harvests.

    A harvest is copied out of the paged cache by the stream that runs the forward, behind the forward that wrote it and
    before any that may write to its blocks again; only that copy is sent. So vLLM may free the blocks at once.

    Args:
        send: sends KV on its way.
    """

    def __init__(self, send: Callable[[KV], Arriving]) -> None:
        self._send = send
        self._expected: dict[int, _Expected] = {}

    @classmethod
    def of(cls, device: torch.device, *, keep: bool) -> Arrivals | None:
        """Arrivals from this device, by a stream of their own; ``None`` where there is nothing to wait for.

        Args:
            device: where the paged cache is.
            keep: references stay on the device.
        """
        if device.type != "cuda":
            return None
        stream = torch.cuda.Stream(device)
        return cls(lambda kv: ToHost(kv, stream, keep=keep))

    def expect(self, job: HarvestJob, kv: KV) -> None:
        """Send the KV of a harvest on its way; a copy of its own, which nobody may change afterwards."""
        self._expected[job.ref_id] = _Expected(job, self._send(kv))

    def take(self) -> Iterator[tuple[HarvestJob, Callable[[], tuple[KV, bool]]]]:
        """What has arrived since the last call, and what has been expected for too long.

        Yields:
            the harvest, and what gives its KV and whether that holds no NaN or infinity.
        """
        for expected in list(self._expected.values()):
            expected.asked += 1
            if expected.asked > PATIENCE or expected.arriving.there():
                del self._expected[expected.job.ref_id]
                yield expected.job, expected.arriving.wait

    def cancel(self, ref_id: int) -> None:
        """Expect a reference no longer; unknown ones are ignored. What is being copied is copied to the end."""
        self._expected.pop(ref_id, None)

    def clear(self) -> None:
        """Expect nothing any more."""
        self._expected.clear()

    def __len__(self) -> int:
        return len(self._expected)


logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference between the two paths, relative to the largest number, by cache dtype."""


class FusedLoads:
    """The kernel over a worker's paged cache.

    Args:
        cache: the worker's paged cache.
        kernel: the kernel over the same layers.
    """

    def __init__(self, cache: PagedCache, kernel: FusedCache) -> None:
        self._cache = cache
        self._kernel: FusedCache | None = kernel
        self._trusted = False

    @classmethod
    def over(cls, cache: PagedCache, rope: Rope) -> FusedLoads | None:
        """The kernel over a paged cache, or ``None`` where it cannot be used."""
        form = block_form(cache)
        if form is None or not available(cache.device):
            return None
        return cls(cache, FusedCache(cache.layers, rope, form))

    def write(
        self,
        reference: KV,
        correction: Correction | None,
        positions: torch.Tensor,
        blocks: Sequence[int],
        start: int,
        plain: Callable[[], Iterable[tuple[slice, KV]]],
    ) -> bool | None:
        """Write a content's estimate into the paged cache.

        Args:
            reference: keys before rotation and values, ``(layers, kv_heads, tokens, head_dim)``.
            correction: of these tokens; ``None`` if it is no affine map.
            positions: ``(tokens,)``, where the keys are rotated to.
            blocks: the sequence's block table.
            start: token of the sequence that the content begins at.
            plain: the same estimate by the plain path, to compare with.

        Returns:
            whether the estimate holds no NaN or infinity; ``None``: the plain path has to write it.
        """
        if self._kernel is None or correction is None or not self._kernel.takes(reference, correction):
            return None
        end = start + reference.keys.shape[2]
        slots = to_device(self._cache.slots(blocks, torch.arange(start, end)), self._cache.device)
        try:
            strange = int(self._kernel.write(reference, correction, positions, slots))
        except Exception:  # a kernel that cannot be built or started here costs some speed, nothing else
            logger.warning("The fused kernel failed; loads take the plain path from now on", exc_info=True)
            self._kernel = None
            return None
        if self._trusted:
            return not strange
        if strange:  # the plain path decides whether the estimate or the kernel is to blame
            return None
        self._trusted = self._agrees(self._cache.read(blocks, start, end), plain())
        if not self._trusted:
            logger.warning("The fused kernel does not agree with the plain path, which loads take from now on")
            self._kernel = None
            return None
        return True

    def _agrees(self, written: KV, plain: Iterable[tuple[slice, KV]]) -> bool:
        tolerance = TOLERANCE.get(self._cache.dtype, 0.0)
        return all(
            bool((mine[layers].float() - theirs).abs().max() <= tolerance * theirs.abs().max())
            for layers, kv in plain
            for mine, theirs in zip(written, kv, strict=True)
        )


def block_form(cache: PagedCache) -> BlockForm | None:
    """Where the kernel has to write; ``None`` where tokens or channels come in tiles, and in a CPU's own layout."""
    if cache.layout is Layout.CPU:
        return None
    packing = cache.layout if isinstance(cache.layout, Packing) else Packing.of(cache.layers[0], cache.layout)
    if packing.halves is None or any(half.tiled for half in packing.halves):
        return None
    keys, values = (
        Half(half.base, half.head_stride, half.tokens[0].stride, half.channels[0].stride) for half in packing.halves
    )
    return BlockForm(cache.kv_heads, cache.block_size, cache.head_dim, packing.shape.block_stride, keys, values)


class _Content(NamedTuple):
    """What the estimate of a span is made of."""

    part: KV
    """The reference's tokens, on the cache's device."""
    policy: Policy
    leverage: float | None
    positions: torch.Tensor
    """Where the keys are rotated to."""


class SpanTransfer:
    """Reads and writes the spans of one worker.

    Args:
        cache: the worker's paged cache.
        rope: the model's rotation.
        store: the worker's references.
        learner: what it has learned.
        faults: armed ones strike here.
    """

    def __init__(
        self, cache: PagedCache, rope: Rope, store: ReferenceStore, learner: Learner, faults: FaultInjector
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
            whether it holds no NaN or infinity; if not, what is there now must not be used.

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
        part = self._faults.spoil(InjectionPoint.REFERENCE, KV(keys, values))
        policy = self._learner.policy(name)
        leverage = None if span.exact else self._learner.leverages.of(name, policy, span.edge, reference)
        first = span.start if policy.traits.rotates else reference.position + span.offset
        positions = torch.arange(first, first + span.end - span.start, device=self.cache.device)
        return _Content(part, policy, leverage, positions)

    def _estimates(self, content: _Content, span: LoadSpan) -> Iterator[tuple[slice, KV]]:
        """Corrected KV of a span with keys rotated to where they belong, a few layers at a time."""
        if span.exact:
            yield slice(0, content.part.keys.shape[0]), content.part
            return
        parts = content.policy.estimates(span.edge, content.part, span.offset, self._scratch, content.leverage)
        for layers, kv in parts:
            estimate = self._faults.spoil(InjectionPoint.CORRECT, kv)
            self.rope.rotate_rows(estimate.keys.transpose(2, 3), content.positions, self._scratch)
            yield layers, estimate
