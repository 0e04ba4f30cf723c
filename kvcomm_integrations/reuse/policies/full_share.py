"""Pasting a cache as it is: what goes wrong without any correction. For comparison only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcomm_integrations.reuse.policies.aligned import Aligned


@dataclass
class FullShare(Aligned):
    """Keys and values are pasted as they were cached, with the rotation of their old position."""

    name: ClassVar[str] = "full_share"
