"""What computing and loading cost on this engine, as it has measured itself: is a plan quicker than doing without?"""

from __future__ import annotations

from collections import deque
from statistics import median

from kvcomm_integrations.planning.plan import Plan, Price

KEPT = 15
"""Measurements of each kind that are kept: their median counts, so that a busy moment does not decide."""
LEAST = 3
"""Measurements before anything is said."""
SMALL_STEP = 8
"""A forward of at most so many tokens costs what any forward costs."""
LARGE_STEP = 32
"""A forward of at least so many tells what a token costs."""


class Rates:
    """Measured prices of one engine. Attention over what lies before costs both ways the same and is left out."""

    def __init__(self) -> None:
        self._step, self._token, self._load, self._extra = (deque[float](maxlen=KEPT) for _ in range(4))

    def note_forward(self, tokens: int, ms: float) -> None:
        """A forward of vLLM's has been timed."""
        if tokens <= SMALL_STEP:
            self._step.append(ms)
        elif tokens >= LARGE_STEP:
            base = median(self._step) if self._step else 0.0
            self._token.append(max(0.0, ms - base) / tokens)

    def note_plan(self, plan: Plan, load_ms: float, repair_ms: float) -> None:
        """A plan has been carried out, alone in its step."""
        if plan.loaded:
            self._load.append(load_ms / plan.loaded)
        if plan.repaired and self._token:
            self._extra.append(max(0.0, repair_ms - plan.repaired * median(self._token)))

    def price(self, plan: Plan) -> Price | None:
        """What a plan is expected to cost; ``None`` while too little is known."""
        if min(len(self._token), len(self._load)) < LEAST:
            return None
        token = median(self._token)
        extra = median(self._extra) if self._extra and plan.repaired else 0.0
        provided = plan.loaded + plan.copied
        return Price(provided * median(self._load) + extra + plan.repaired * token, plan.external * token)

    def declined(self) -> None:
        """A plan was not worth its price. What it was expected to cost fades, so that it is tried again some day."""
        for prices in (self._load, self._extra):
            if prices:
                prices.append(0.97 * median(prices))
