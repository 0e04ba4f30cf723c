"""Pasting a cache as it is: what goes wrong without any correction. For comparison only."""

from __future__ import annotations

from typing import ClassVar

from kvcomm_integrations.reuse.policies.policy import Policy


class FullShare(Policy):
    """Keys and values are pasted as they were cached, with the rotation of their old position (``rotates=False``)."""

    name: ClassVar[str] = "full_share"
