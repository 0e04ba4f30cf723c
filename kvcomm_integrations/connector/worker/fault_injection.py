"""Faults on demand, to test what happens then. Inert: arming one is refused unless ``KVCOMM_FAULT_INJECTION=1``."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from enum import StrEnum

import torch

from kvcomm_integrations.errors import ConfigurationError, EngineError
from kvcomm_integrations.reuse.kv import KV

SWITCH = "KVCOMM_FAULT_INJECTION"
"""Environment variable that allows faults to be armed."""


class InjectionPoint(StrEnum):
    """Where a worker can be made to fail."""

    REFERENCE = "reference"
    CORRECT = "correct"
    REPAIR = "repair"
    FORWARD = "forward"
    HARVEST = "harvest"
    OBSERVE = "observe"
    AUDIT = "audit"
    REPORT = "report"


class Kind(StrEnum):
    """How it fails: an exception, NaN or infinity, a pause, the end of the process, a lost answer."""

    RAISE = "raise"
    NAN = "nan"
    SLOW = "slow"
    EXIT = "exit"
    LOSE = "lose"


PAUSE_S = 1.0
"""How long a slow injection point sleeps, seconds."""


@dataclass
class Fault:
    """What happens the next ``times`` times that a point is passed."""

    kind: Kind
    times: int


class FaultInjector:
    """The faults armed in one worker."""

    def __init__(self) -> None:
        self._armed: dict[InjectionPoint, Fault] = {}

    @property
    def armed(self) -> bool:
        """Some injection point will fail."""
        return bool(self._armed)

    def arm(self, point: str, kind: str, times: int = 1) -> None:
        """Make a point fail the next ``times`` times that it is passed; 0 disarms it.

        Raises:
            ConfigurationError: faults are not allowed here, or the point or kind does not exist.
        """
        if os.environ.get(SWITCH) != "1":
            raise ConfigurationError(f"faults can only be injected where {SWITCH}=1 is set; this engine is not a test")
        try:
            self._armed[InjectionPoint(point)] = Fault(Kind(kind), times)
            if times <= 0:
                del self._armed[InjectionPoint(point)]
        except ValueError as error:
            raise ConfigurationError(f"{error}; injection points are {[*InjectionPoint]}, kinds {[*Kind]}") from error

    def strike(self, point: InjectionPoint) -> bool:
        """Fail if armed.

        Returns:
            the point's result is to be lost.
        """
        return self.armed and self._fire(point) is Kind.LOSE

    def spoil(self, point: InjectionPoint, kv: KV) -> KV:
        """Fail if armed; ``nan`` spoils one number."""
        if not self.armed or self._fire(point) is not Kind.NAN:
            return kv
        keys = kv.keys.clone()
        keys[-1, -1, -1, -1] = torch.nan
        return KV(keys, kv.values)

    def _fire(self, point: InjectionPoint) -> Kind | None:
        fault = self._armed.get(point)
        if fault is None:
            return None
        fault.times -= 1
        if fault.times <= 0:
            del self._armed[point]
        match fault.kind:
            case Kind.RAISE:
                raise EngineError(f"injected fault in {point}")
            case Kind.SLOW:
                time.sleep(PAUSE_S)
            case Kind.EXIT:
                os._exit(70)
        return fault.kind
