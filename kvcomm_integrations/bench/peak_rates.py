"""What this machine can do at best: bytes per second of a copy, operations per second of a matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

COPY_FLOATS, PRODUCT_SIZE = 32 << 20, 2048
"""Float32 numbers copied, far more than any cache holds; rows and columns of the product."""


@dataclass(frozen=True)
class Machine:
    """Best rates measured, with the threads that torch uses."""

    copy_gbps: float
    """Bytes read plus bytes written by a copy between two buffers, 10^9 per second."""
    gemm_gflops: float
    """Operations of a square product in float32, 10^9 per second."""
    threads: int


def milliseconds(work: Callable[[], Any], repeats: int) -> float:
    """Median time of ``work`` after one run that does not count, milliseconds."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e3)
    return median(times[1:])


def measure_machine(repeats: int) -> Machine:
    """Measure both rates."""
    source = torch.randn(COPY_FLOATS)
    target = torch.empty_like(source)
    copy_ms = milliseconds(lambda: target.copy_(source), repeats)
    left, right = torch.randn(2, PRODUCT_SIZE, PRODUCT_SIZE)
    gemm_ms = milliseconds(lambda: left @ right, repeats)
    return Machine(2 * source.nbytes / copy_ms / 1e6, 2 * PRODUCT_SIZE**3 / gemm_ms / 1e6, torch.get_num_threads())
