"""Harvests whose KV is still on its way to where it is kept; each counts as stored only once it is there.

The paged cache itself is read at once, in the stream that computes: whatever vLLM writes to these blocks later comes
after that, so blocks need not be held for longer than the step. What takes its time, and is not waited for, is the way
from the GPU to host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvcomm_integrations.connector.metadata import HarvestJob
from kvcomm_integrations.reuse.policies.base import KV
from kvcomm_integrations.reuse.transfers import Arriving, ToHost

PATIENCE = 16
"""Steps after which a copy is waited for: well before the scheduler half would take it for lost."""


@dataclass
class _Expected:
    job: HarvestJob
    arriving: Arriving
    asked: int = 0


class Arrivals:
    """What is on its way, in the order of harvests.

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
        """Send the KV of a harvest on its way; nobody may change it afterwards."""
        self._expected[job.ref_id] = _Expected(job, self._send(kv))

    def take(self) -> Iterator[tuple[HarvestJob, Callable[[], tuple[KV, bool]]]]:
        """What has arrived since the last call, and what has been expected for too long.

        Yields:
            the harvest, and what gives its KV and whether that is numbers throughout.
        """
        for expected in list(self._expected.values()):
            expected.asked += 1
            if expected.asked > PATIENCE or expected.arriving.there():
                del self._expected[expected.job.ref_id]
                yield expected.job, expected.arriving.wait

    def cancel(self, ref_id: int) -> None:
        """Expect a reference no longer; unknown ones are ignored."""
        self._expected.pop(ref_id, None)

    def clear(self) -> None:
        """Expect nothing any more."""
        self._expected.clear()

    def __len__(self) -> int:
        return len(self._expected)
