"""What admission costs in the scheduler: resolving a prompt, finding its contents, asking the gate, making the plan."""

from __future__ import annotations

from kvcomm_integrations.bench.peak_rates import milliseconds
from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.planning.entries import Reservation
from kvcomm_integrations.planning.forecast import ForecastRequest, PlanForecast
from kvcomm_integrations.planning.resolved_prompt import resolve
from kvcomm_integrations.wire import KVCommParams, Segment, SegmentKind

TOKENS, EXAMPLES, PREFIX = 4096, 25, 64


def admission_steps(repeats: int) -> list[tuple[str, float]]:
    """Milliseconds of each step for one content of ``TOKENS`` tokens over an edge with ``EXAMPLES`` examples."""
    config = ReuseConfig()
    forecast = PlanForecast(config)
    index, edges, planner = forecast.index, forecast.edges, forecast.planner
    segments = (
        Segment(kind=SegmentKind.FIXED, start=0, end=PREFIX),
        Segment(kind=SegmentKind.PLACEHOLDER, name="user_question", start=PREFIX, end=PREFIX + TOKENS),
        Segment(kind=SegmentKind.FIXED, start=PREFIX + TOKENS, end=PREFIX + TOKENS + 8),
    )
    ids = [(7 * i) % 49_152 for i in range(PREFIX + TOKENS + 8)]
    request = ForecastRequest("", ids, len(ids), cache_salt=None)
    params = KVCommParams(agent="solver", segments=segments)
    prompt = resolve(request, params, config)
    content = prompt.segments[1]
    entry = index.reserve(Reservation(content.key, TOKENS, content.name, "planner", dense=True, length=TOKENS))
    assert entry is not None
    index.acknowledge(entry.ref_id, 1)
    edge = planner.edge(prompt, content, entry)
    edges.learned("ridge", edge, EXAMPLES)
    entry.leverage[("ridge", edge)] = 0.5
    token_ids = prompt.ids(content.segment)

    def plan() -> None:
        assert planner.plan(prompt, planner.look_up(prompt), 0, "ridge").plan is not None

    return [
        (f"resolve {len(ids):,} token ids, once", milliseconds(lambda: resolve(request, params, config), 20 * repeats)),
        ("match: find the content", milliseconds(lambda: index.find(content.key, token_ids), 20 * repeats)),
        ("gate", milliseconds(lambda: edges.decide("ridge", edge, entry, TOKENS), 20 * repeats)),
        (f"plan: all of admission, {EXAMPLES} examples x {TOKENS:,} tokens", milliseconds(plan, 20 * repeats)),
    ]
