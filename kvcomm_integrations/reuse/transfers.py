"""Moving tensors between host and accelerator without waiting for them. On a CPU they are there at once."""

from __future__ import annotations

from typing import Protocol

import torch

from kvcomm_integrations.reuse.kv import KV, checksum


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small tensor made on the host (of any shape, such as slot numbers) in the memory of ``device``.

    From pageable memory the copy would wait for what the accelerator is doing; pinned memory is kept by torch until the
    copy is over.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Arriving(Protocol):
    """KV being copied to where it is kept."""

    def there(self) -> bool:
        """Whether it has arrived; does not wait."""

    def wait(self) -> tuple[KV, bool]:
        """Wait until it has arrived: the KV, and whether it holds no NaN or infinity."""


class ToHost:
    """KV being copied from a GPU to pinned host memory, by a stream of its own, after all work queued so far.

    The stream reads ``kv`` and nothing else. So ``kv`` has to be a copy of what is in the paged cache, made by the
    current stream: then it was made before that stream lets any later step write to the same blocks, and from then on
    it is of no concern what becomes of them. Memory of ``kv`` is not given to anybody else before the copy is over,
    even if nobody wants the result any more.

    Args:
        kv: what to copy, each ``(layers, kv_heads, tokens, head_dim)``; it must not be changed any more.
        stream: the stream that copies.
        keep: leave the KV on the GPU; only whether it is finite is brought to the host.
    """

    def __init__(self, kv: KV, stream: torch.cuda.Stream, *, keep: bool) -> None:
        self._source = kv  # freed by the one who waits, when the copy is over
        self._sum = checksum(kv)
        for part in (*kv, self._sum):  # freed earlier, by one who does not wait, memory stays unused until then
            part.record_stream(stream)
        stream.wait_stream(torch.cuda.current_stream(kv.keys.device))
        with torch.cuda.stream(stream):
            self._kept = kv if keep else KV(_to_pinned(kv.keys), _to_pinned(kv.values))
            self._total = _to_pinned(self._sum)
            self._done = torch.cuda.Event()
            self._done.record(stream)

    def there(self) -> bool:
        return bool(self._done.query())

    def wait(self) -> tuple[KV, bool]:
        self._done.synchronize()
        return self._kept, bool(torch.isfinite(self._total))


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
