"""Rotation only: the yardstick every learned correction has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcomm_integrations.reuse.edge import Edge, Readiness
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.policies.policy import Policy


@dataclass
class Aligned(Policy):
    """Keys are rotated to their new position, and nothing else is changed."""

    name: ClassVar[str] = "aligned"

    def observe(self, edge: Edge, reference: KV, truth: KV) -> None:
        """Learns nothing."""

    def ready(self, edge: Edge, reference: KV | None = None) -> Readiness:
        """Always ready: there is nothing to know."""
        return Readiness(examples=0, ready=True, reason="nothing to learn")

    def correct(self, edge: Edge, reference: KV, start: int = 0) -> KV:
        """The reference itself."""
        return reference

    def state_bytes(self, edge: Edge | None = None) -> int:
        """Nothing is kept."""
        return 0

    def forget(self, edge: Edge) -> None:
        """Nothing is kept."""

    def edges(self) -> tuple[Edge, ...]:
        """Nothing is kept."""
        return ()
