"""Random conversations against a model of what may be found of an agent's own past (invariants 2 and 5).

The model is vLLM's prefix cache as a dictionary from hash to what a block truly holds: nothing but exact KV, or KV over
estimates, and whose. It is filled as vLLM fills it, and looked through as vLLM looks through it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from kvcomm_integrations.connector.metadata import WorkerReport
from kvcomm_integrations.planning.jobs import LoadResult
from kvcomm_integrations.wire import WIRE_KEY, RequestReport
from tests.connector.standins import BLOCK, Engine, exact_hashes, make_half, make_request, segment

Name = tuple[str, str, str]
"""Tenant, session and agent."""


@dataclass(frozen=True)
class Filed:
    """A block of the model's cache."""

    tokens: tuple[int, ...]
    """Of the block and all before it."""
    owner: Name | None
    """Whose estimates it rests on; ``None``: it is exact."""


@dataclass
class Talk:
    """A conversation of one agent: its segments so far."""

    name: Name
    parts: list[tuple[str, list[int]]] = field(default_factory=list)

    def prompt(self, extra: list[tuple[str, list[int]]]) -> tuple[list[int], list[dict[str, Any]]]:
        ids: list[int] = []
        segments = []
        for kind, part in [*self.parts, *extra]:
            if kind:
                segments.append(segment("placeholder", len(ids), len(ids) + len(part), kind))
            ids += part
        return ids, segments


class World:
    """A scheduler half, its cache, and the conversations of some agents."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.random = random.Random(seed)
        self.half = make_half(**options)
        self.engine = Engine(self.half)
        self.cache: dict[bytes, Filed] = {}
        self.half.cached_blocks = self.cached
        self.talks: list[Talk] = []
        self.contents = [self.some(self.random.randrange(20, 70)) for _ in range(6)]
        self.carried = self.loaded = self.after = 0

    def some(self, count: int) -> list[int]:
        return [self.random.randrange(1000) for _ in range(count)]

    def cached(self, hashes: Any) -> int:
        return next((n for n, value in enumerate(hashes) if value not in self.cache), len(hashes))

    def turn(self) -> None:
        """One request of some agent, from its arrival to its end."""
        rnd = self.random
        if not self.talks or rnd.random() < 0.15:
            name = (rnd.choice("tu"), rnd.choice("xyz"), rnd.choice(["planner", "solver", "critic"]))
            system = [("", [ord(name[2][0])] * rnd.choice([10, 40]))]
            self.talks.append(Talk(name, system))
        talk = rnd.choice(self.talks)
        if rnd.random() < 0.15 and len(talk.parts) > 1:  # a fork, or a history that is edited
            talk = Talk(talk.name, talk.parts[: rnd.randrange(1, len(talk.parts))])
            self.talks.append(talk)
        elif rnd.random() < 0.1:  # the same words in another session
            talk = Talk((talk.name[0], rnd.choice("xyz"), talk.name[2]), list(talk.parts))
            self.talks.append(talk)
        new = [(f"c{n}", self.contents[n]) for n in rnd.sample(range(6), rnd.randrange(3))] + [("", self.some(5))]
        mode = rnd.choice(["auto"] * 8 + ["dense", "observe"])
        ids, segments = talk.prompt(new)
        params = {
            "tenant": talk.name[0], "session": talk.name[1], "agent": talk.name[2], "mode": mode, "segments": segments,
            "response_name": f"agent:{talk.name[2]}:response",
        }  # fmt: skip
        request = make_request(ids, params, salt=talk.name[0])
        answer = self.some(rnd.randrange(1, 40))
        self.run(request, talk.name, mode, answer)
        talk.parts += [*new, (f"agent:{talk.name[2]}:response", answer)]
        if len(talk.parts) > 12:
            self.talks.remove(talk)
        if rnd.random() < 0.2:  # vLLM evicts
            for value in rnd.sample(sorted(self.cache), len(self.cache) // 5):
                del self.cache[value]
        if rnd.random() < 0.02:
            self.half.reset_cache()
            self.cache.clear()

    def run(self, request: Request, name: Name, mode: str, answer: list[int]) -> None:
        self.half.on_new_request(request)
        external = None
        for _ in range(5):
            most = (request.num_tokens - 1) // BLOCK
            hit = BLOCK * min(most, self.cached(request.block_hashes))
            external = self.engine.admit(request, hit)
            if external is not None:
                break
        assert external is not None, "it waits for nobody"
        hits = [self.cache[value] for value in request.block_hashes[: hit // BLOCK]]
        for number, filed in enumerate(hits):
            assert filed.tokens == tuple(request.all_token_ids[: (number + 1) * BLOCK])
            assert filed.owner in (None, name)
        past = next((number for number, filed in enumerate(hits) if filed.owner is not None), len(hits))
        if mode != "auto":
            assert past == len(hits), "only requests that reuse see estimates"
        meta = self.engine.prefill(request)
        self.engine.obey(meta)
        estimated = bool(len(hits) - past) or any(not span.exact for job in meta.loads for span in job.spans)
        report = self.end(request, answer)
        assert report.carried == BLOCK * (len(hits) - past)
        assert 0 <= report.carried_estimate <= report.carried
        assert report.prompt_tokens == sum(
            getattr(report, kind) for kind in ("exact", "carried", "loaded", "repaired", "computed")
        )
        if mode == "dense" or mode == "observe":
            assert not estimated
        first = next((span.start for job in meta.loads for span in job.spans if not span.exact), None)
        border = past * BLOCK if len(hits) > past else first
        for number, value in enumerate(request.block_hashes):
            exact = border is None or (number + 1) * BLOCK <= border
            assert (value == exact_hashes(request)[number]) == exact
            tokens = tuple(request.all_token_ids[: (number + 1) * BLOCK])
            self.cache.setdefault(value, Filed(tokens, None if exact else name))
        self.carried += report.carried
        self.loaded += report.loaded
        self.after += bool(report.carried and report.loaded)

    def end(self, request: Request, answer: list[int]) -> RequestReport:
        _, out = self.engine.finish(request, answer)
        self.engine.obey(self.engine.step())
        return RequestReport.model_validate(out[WIRE_KEY])


@pytest.mark.parametrize("options", [{}, {"audit_rate": 0.2, "learn_rate": 0.3}, {"join_runs": False}])
def test_random_conversations_find_only_what_they_may(options: dict[str, Any]) -> None:
    worlds = [World(seed, **options) for seed in range(6)]
    for world in worlds:
        for _ in range(120):
            world.turn()
    assert sum(world.carried for world in worlds) > 4000
    assert sum(world.loaded for world in worlds) > 5000
    assert sum(world.after for world in worlds) > 10


def test_after_a_load_that_failed_the_lineage_finds_nothing_of_it() -> None:
    half = make_half()
    engine, cache = Engine(half), set[bytes]()
    half.cached_blocks = lambda hashes: next((n for n, v in enumerate(hashes) if v not in cache), len(hashes))
    content = list(range(100, 170))

    def ask(agent: str, extra: list[int]) -> Request:
        ids = [ord(agent[0])] * 20 + content + extra
        params = {"agent": agent, "session": "s", "segments": [segment("placeholder", 20, 90, "q")]}
        request = make_request(ids, params)
        half.on_new_request(request)
        return request

    first = ask("planner", [1] * 5)
    engine.admit(first)
    engine.obey(engine.prefill(first))
    engine.obey(engine.step())
    for fault in ("", "it broke"):
        request = ask("solver", [2] * 5)
        assert engine.admit(request)
        meta = engine.prefill(request)
        half.update_connector_output(WorkerReport(loads={job.req_id: LoadResult(1, 1, fault) for job in meta.loads}))
        request.append_output_token_ids([3] * 40)
        cache.update(request.block_hashes)
        request.status = RequestStatus.FINISHED_STOPPED
        half.request_finished(request, [])
        later = ask("solver", [2] * 5 + [3] * 40 + [4] * 20)
        assert half._live[later.request_id].guard.inherited == (not fault)
        half.request_finished(later, [])
        cache.clear()
