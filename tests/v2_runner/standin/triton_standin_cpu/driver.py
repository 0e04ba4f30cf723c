"""The driver that Triton asks a backend for: the CPU as its only device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.backends import driver
from triton.backends.compiler import GPUTarget


class StandInDriver(driver.DriverBase):
    """Says that there is one device, the CPU."""

    def __init__(self) -> None:
        """Nothing to load."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "int"

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", "x86", 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda *args, **kwargs: [0.0]
