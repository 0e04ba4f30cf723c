"""Rotation only: the yardstick every learned correction has to beat."""

from __future__ import annotations

from typing import ClassVar

from kvcomm_integrations.reuse.policies.policy import Policy


class Aligned(Policy):
    """Keys are rotated to their new position, and nothing else is changed."""

    name: ClassVar[str] = "aligned"
