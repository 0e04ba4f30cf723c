"""What ``kvcomm explain`` and the fake engine forecast is what the connector's scheduler really plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_integrations.config import Isolation, ReuseConfig
from kvcomm_integrations.planning.forecast import PlanForecast
from kvcomm_integrations.wire import KVCommParams, RequestReport
from tests.connector.standins import BLOCK, Engine, make_half, make_request, segment

STOP = 1
TEMPLATES = [[10 + i for i in range(n)] for n in (3, 9, 20, 40)]
CONTENTS = [[1000 * k + i for i in range(n)] for k, n in ((1, 12), (2, 33), (3, 70), (4, 7))]
SETTINGS = [
    {},
    {"join_runs": False},
    {"isolation": Isolation.TENANT},
    {"isolation": Isolation.GLOBAL, "max_repair_share": 0.3},
    {"repair_depth": 8, "max_repair_tokens": 30},
    {"repair": False},
    {"policy": "kvcmas"},
    {"policy": "aligned", "strict": False},
    {"enabled": False},
]


@dataclass(frozen=True)
class Ask:
    """One request: template texts and contents in turn, and the answer."""

    agent: str
    session: str
    tenant: str
    salt: str | None
    mode: str
    parts: tuple[tuple[int, int, int], ...]
    """Template text, content (negative: an earlier answer, counted from the latest), first token of it."""
    answer: tuple[int, ...]
    release: bool


PARTS = st.tuples(st.integers(0, len(TEMPLATES) - 1), st.integers(-2, len(CONTENTS) - 1), st.sampled_from([0, 0, 0, 5]))
asks = st.builds(
    Ask,
    agent=st.sampled_from("abc"),
    session=st.sampled_from(["s", "t"]),
    tenant=st.sampled_from(["default", "u"]),
    salt=st.sampled_from([None, "salt"]),
    mode=st.sampled_from(["auto", "auto", "auto", "dense", "observe"]),
    parts=st.lists(PARTS, min_size=1, max_size=4).map(tuple),
    answer=st.lists(st.integers(5000, 5003), max_size=40).map(tuple),
    release=st.sampled_from([False, False, False, True]),
)


class Prefixes:
    """vLLM's prefix cache, by the block hashes that requests really carry."""

    def __init__(self) -> None:
        self._hashes: set[bytes] = set()

    def hit(self, request: Any) -> int:
        blocks = 0
        for value in request.block_hashes[: (request.num_prompt_tokens - 1) // BLOCK]:
            if bytes(value) not in self._hashes:
                break
            blocks += 1
        return blocks * BLOCK

    def keep(self, request: Any) -> None:
        full = (request.num_tokens - 1) // BLOCK
        self._hashes.update(bytes(value) for value in request.block_hashes[:full])


def prompt_of(ask: Ask, said: list[tuple[int, ...]]) -> tuple[list[int], list[dict[str, Any]]]:
    ids: list[int] = []
    segments = []
    for template, content, first in ask.parts:
        ids += TEMPLATES[template]
        whole = CONTENTS[content] if content >= 0 else (list(said[content]) if len(said) >= -content else [])
        part = whole[first:]
        if part:
            segments.append(segment("placeholder", len(ids), len(ids) + len(part), f"c{content}"))
            ids += part
    return [*ids, 7, 8, 9], segments


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SETTINGS), st.lists(asks, min_size=1, max_size=8))
def test_a_forecast_is_the_schedulers_plan(options: dict[str, Any], requests: list[Ask]) -> None:
    config = ReuseConfig(**{"audit_rate": 0.0, "learn_rate": 0.0, "min_segment_tokens": 4, **options})
    forecast = PlanForecast(config, block_size=BLOCK)
    plain = {name: getattr(config, name) for name in ReuseConfig.model_fields}
    engine, prefixes, said = Engine(make_half(**plain)), Prefixes(), list[tuple[int, ...]]()
    for ask in requests:
        ids, segments = prompt_of(ask, said)
        params: dict[str, Any] = {
            "agent": ask.agent,
            "session": ask.session,
            "tenant": ask.tenant,
            "mode": ask.mode,
            "segments": segments,
            "response_name": f"agent:{ask.agent}:response",
            "release": ask.release,
        }
        request = make_request(ids, params, salt=ask.salt)
        engine.half.on_new_request(request)
        assert engine.admit(request, prefixes.hit(request)) is not None
        engine.obey(engine.prefill(request))
        _, out = engine.finish(request, [*ask.answer, STOP])
        engine.obey(engine.step())
        prefixes.keep(request)
        assert out is not None
        real = RequestReport.from_transfer_params(out)
        told = forecast.next(KVCommParams.model_validate(params), ids, cache_salt=ask.salt, answer=ask.answer)
        assert real is not None
        assert told == real.model_copy(update={"plan_ms": 0.0, "load_ms": 0.0, "repair_ms": 0.0})
        said.append(ask.answer)
