"""Edges: what corrections are learned for, and what is known about one. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Edge(NamedTuple):
    """What a correction is learned for: an ordered pair of agents and the name of the placeholder.

    ``scope`` keeps tenants (and LoRA adapters, models) apart; equal edges of different scopes never share state.
    """

    source: str
    target: str
    name: str
    scope: str = ""


@dataclass(frozen=True)
class Readiness:
    """What a policy knows about an edge, and about a content on it."""

    examples: int
    """Dense observations learned from."""
    ready: bool
    """The policy has a correction for this edge."""
    leverage: float | None = None
    """How far the content is from the examples, in units where below 0.8 is familiar and above 1 is new."""
    reason: str = ""
    """Why it is not ready, or why it always is."""
