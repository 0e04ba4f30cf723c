"""What the workers have reported of themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class WorkersState:
    """What all workers of an engine can do at present."""

    disabled: str
    """Why nothing is reused at all; empty if it is."""
    repair_refusal: str | None
    """Why there is no repair pass; ``None`` where it runs."""
    verified: bool = False
    """The rotation has been checked on real keys."""
    weights: int = 0
    """How often the model's weights have been replaced since the start."""
