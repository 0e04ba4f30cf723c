"""What admission costs in the scheduler half: finding a content, asking the gate, making the plan. No engine runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvcomm_integrations.bench.peak_rates import milliseconds
from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.connector.scheduler import wants_promised
from kvcomm_integrations.ids import content_id
from kvcomm_integrations.planning.content_keys import Contents
from kvcomm_integrations.planning.edge_table import EdgeTable
from kvcomm_integrations.planning.plan import make_plan
from kvcomm_integrations.planning.planner import Planner
from kvcomm_integrations.planning.reference_index import ReferenceIndex
from kvcomm_integrations.planning.request_state import RequestState, WorkersState
from kvcomm_integrations.wire import KVCommParams, Segment, SegmentKind

TOKENS = 4096
EXAMPLES = 25
PREFIX = 64
BUDGET_MS = 0.5
"""What planning a prompt may take, milliseconds."""


def admission_steps(repeats: int) -> list[tuple[str, float]]:
    """Milliseconds of each step for one content of ``TOKENS`` tokens over an edge with ``EXAMPLES`` examples."""
    config = ReuseConfig()
    index = ReferenceIndex(config.store_bytes, 1, 1)
    edges, contents = EdgeTable(config), Contents(config, index)
    planner = Planner(config, index, edges, contents, WorkersState(disabled="", repair_refusal=None, verified=True))
    tracked = _request()
    content = tracked.params.segments[1]
    entry = index.promise(
        contents.key(tracked, content), TOKENS, name=content.name, source="planner", dense=True, owner=""
    )
    assert entry is not None
    index.acknowledge(entry.ref_id, 1)
    edge = contents.edge(tracked, entry, content.name)
    edges.learned("ridge", edge, EXAMPLES)
    entry.leverage[("ridge", edge)] = 0.5

    def plan() -> None:
        wants_promised(contents, tracked, 0)
        made = make_plan(tracked.prompt_tokens, 0, planner.candidates(tracked, "ridge"), planner.limits())
        assert not isinstance(made, str), made

    ids = contents.ids(tracked, content)
    return [
        (f"hash {TOKENS:,} token ids", milliseconds(lambda: content_id(ids), 20 * repeats)),
        ("match: find the content", milliseconds(lambda: contents.find(tracked, content), 20 * repeats)),
        ("gate", milliseconds(lambda: edges.decide("ridge", edge, entry, TOKENS), 20 * repeats)),
        (f"plan: all of admission, {EXAMPLES} examples x {TOKENS:,} tokens", milliseconds(plan, 20 * repeats)),
    ]


def _request() -> RequestState:
    segments = (
        Segment(kind=SegmentKind.FIXED, start=0, end=PREFIX),
        Segment(kind=SegmentKind.PLACEHOLDER, name="user_question", start=PREFIX, end=PREFIX + TOKENS),
        Segment(kind=SegmentKind.FIXED, start=PREFIX + TOKENS, end=PREFIX + TOKENS + 8),
    )
    ids = [(7 * i) % 49_152 for i in range(PREFIX + TOKENS + 8)]
    request: Any = SimpleNamespace(prompt_token_ids=ids, num_prompt_tokens=len(ids), cache_salt=None)
    guard: Any = None
    return RequestState(request, KVCommParams(agent="solver", segments=segments), '["", "default"]', "ridge", guard)
