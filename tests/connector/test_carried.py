"""Random conversations against a model of what may be found of an agent's own past (invariants 2 and 5).

The model is vLLM's prefix cache as a dictionary from hash to what a block truly holds: nothing but exact KV, or KV over
estimates, and whose. It is filled as vLLM fills it, and looked through as vLLM looks through it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from kvcomm_integrations.connector.metadata import WorkerReport
from kvcomm_integrations.planning.jobs import LoadResult
from kvcomm_integrations.wire import WIRE_KEY, Mode, RequestReport
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
        self.seed, self.numbers = seed, count()  # whether a request is audited depends on its name
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
        request = make_request(ids, params, salt=talk.name[0], request_id=f"{self.seed}-{next(self.numbers)}")
        answer = self.some(rnd.randrange(1, 40))
        self.run(request, talk.name, mode, answer)
        talk.parts += [*new, (f"agent:{talk.name[2]}:response", answer)]
        if len(talk.parts) > 12:
            self.talks.remove(talk)
        if rnd.random() < 0.2:  # vLLM evicts
            for value in rnd.sample(list(self.cache), len(self.cache) // 5):
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
    worlds = [World(seed, **options) for seed in range(8)]
    for world in worlds:
        for _ in range(120):
            world.turn()
    assert sum(world.carried for world in worlds) > 5000
    assert sum(world.loaded for world in worlds) > 5000
    assert sum(world.after for world in worlds) > 10


CONTENT = list(range(100, 170))
FIRST = [ord("s")] * 20 + CONTENT + [2] * 5
ANSWER = [3] * 40
SECOND = [*FIRST, *ANSWER, *[4] * 20]
"""The past ends with a block at token 128."""


class Turns:
    """A solver that loads a content in its first turn, and its next requests."""

    def __init__(self, **options: Any) -> None:
        self.half = half = make_half(**options)
        self.engine, self.cache = Engine(half), set[bytes]()
        half.cached_blocks = self.cached
        self.end(self.begin([ord("p")] * 20 + CONTENT + [1] * 5, agent="planner"), [1])

    def cached(self, hashes: Any) -> int:
        return next((n for n, value in enumerate(hashes) if value not in self.cache), len(hashes))

    def hit(self, request: Request) -> int:
        return BLOCK * min(self.cached(request.block_hashes), (request.num_tokens - 1) // BLOCK)

    def arrive(self, ids: list[int], **params: Any) -> Request:
        request = make_request(ids, {
            "agent": "solver", "session": "s", "segments": [segment("placeholder", 20, 90, "q")], **params,
        })  # fmt: skip
        self.half.on_new_request(request)
        return request

    def begin(self, ids: list[int], **params: Any) -> Request:
        """A request whose prompt is computed."""
        request = self.arrive(ids, **params)
        assert self.engine.admit(request, self.hit(request)) is not None
        self.engine.obey(self.engine.prefill(request))
        return request

    def end(self, request: Request, answer: list[int]) -> RequestReport:
        _, out = self.engine.finish(request, answer)
        self.engine.obey(self.engine.step())
        self.cache.update(request.block_hashes)
        return RequestReport.model_validate(out[WIRE_KEY])

    def carries(self) -> bool:
        """Whether the second turn would go on from the first."""
        request = self.arrive(SECOND)
        found = self.half._live[request.request_id].guard.inherited
        request.status = RequestStatus.FINISHED_ABORTED
        self.half.request_finished(request, [])
        return found


def test_the_second_turn_carries_all_full_blocks_of_the_first() -> None:
    turns = Turns()
    first = turns.end(turns.begin(FIRST), ANSWER)
    assert (first.carried, first.loaded > 0) == (0, True)
    second = turns.end(turns.begin(SECOND), [5])
    assert (second.exact, second.carried, second.computed) == (BLOCK, 128 - BLOCK, len(SECOND) - 128)
    assert second.carried_estimate == first.loaded
    assert second.mode is Mode.AUTO
    content = second.segments[1]
    assert (content.carried, content.exact, content.loaded) == (70, 0, 0)


@pytest.mark.parametrize("params", [{"mode": "dense"}, {"mode": "observe"}, {"agent": "critic"}, {"session": "r"}])
def test_nobody_else_carries_it(params: dict[str, Any]) -> None:
    turns = Turns()
    turns.end(turns.begin(FIRST), ANSWER)
    request = turns.arrive(SECOND, **params)
    assert turns.hit(request) == BLOCK
    assert request.block_hashes == exact_hashes(request)


def test_it_can_be_switched_off() -> None:
    turns = Turns(carry=False)
    turns.end(turns.begin(FIRST), ANSWER)
    assert turns.end(turns.begin(SECOND), [5]).carried == 0


@pytest.mark.parametrize("trouble", ["refused", "planning fails"])
def test_who_turns_dense_after_estimates_were_found_has_vllm_look_again(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(max_faults=1)
    turns.end(turns.begin(FIRST), ANSWER)
    request = turns.arrive(SECOND)
    assert turns.hit(request) == 128
    if trouble == "refused":
        turns.half.breaker.fault("load", "it broke")
    else:
        monkeypatch.setattr(turns.half.planner, "look_up", lambda prompt: 1 / 0)
    assert turns.engine.admit(request, 128) is None
    assert request.block_hashes == exact_hashes(request)
    assert turns.engine.admit(request, turns.hit(request)) == 0
    turns.engine.obey(turns.engine.prefill(request))
    report = turns.end(request, [5])
    assert (report.exact, report.carried) == (BLOCK, 0)
    assert request.block_hashes == exact_hashes(request)


def test_an_audit_leaves_the_past() -> None:
    turns = Turns(audit_rate=0.5)
    audited = carried = 0
    for number in range(30):
        turns.half._live.clear()
        request = turns.arrive([*SECOND[:110], *[5 + number] * 20, *CONTENT, 9], segments=[
            segment("placeholder", 20, 90, "q"), segment("placeholder", 130, 200, "r"),
        ])  # fmt: skip
        while turns.engine.admit(request, hit := turns.hit(request)) is None:
            pass
        meta = turns.engine.prefill(request)
        turns.engine.obey(meta)
        live = turns.half._live[request.request_id]
        if live.dense_instead:
            audited += 1
            assert live.carried == 0
            assert not meta.loads
            assert request.block_hashes == exact_hashes(request)
            assert hit <= 128
        carried += live.carried > 0
        turns.end(request, [1])
        turns.cache -= set(exact_hashes(request)[1:])
    assert audited > 3
    assert carried > 3


def test_two_calls_at_once_carry_one_past_and_each_other_s_blocks() -> None:
    turns = Turns()
    turns.end(turns.begin(FIRST), ANSWER)
    one, two = turns.begin(SECOND), turns.begin(SECOND)
    assert one.block_hashes == two.block_hashes
    reports = [turns.end(one, [5] * 20), turns.end(two, [6] * 20)]
    assert [report.carried for report in reports] == [112, 112]
    later = turns.begin([*SECOND, *[6] * 20, 7])
    assert turns.end(later, [1]).carried == (len(SECOND) + 20) // BLOCK * BLOCK - BLOCK


def test_a_preempted_request_finds_its_own_blocks_again_and_says_so() -> None:
    turns = Turns()
    request = turns.begin(FIRST)
    turns.cache.update(request.block_hashes)
    loaded = turns.half._live[request.request_id].plan.loaded  # type: ignore[union-attr]
    request.num_preemptions, request.num_computed_tokens, request.status = 1, 0, RequestStatus.PREEMPTED
    turns.engine.step()
    assert turns.engine.admit(request, turns.hit(request)) == 0
    turns.engine.obey(turns.engine.prefill(request))
    report = turns.end(request, ANSWER)
    assert (report.exact, report.carried, report.loaded) == (BLOCK, 80 - BLOCK, 0)
    assert report.carried_estimate == loaded - 10, "its last block was not full yet"
    assert turns.carries()


@pytest.mark.parametrize("forget", ["session", "all"])
def test_who_waited_while_the_past_was_forgotten_does_without(forget: str) -> None:
    turns = Turns()
    turns.end(turns.begin(FIRST), ANSWER)
    preempted = turns.begin(SECOND)
    turns.cache.update(preempted.block_hashes)
    request = turns.arrive(SECOND)
    assert turns.half._live[request.request_id].guard.inherited
    if forget == "session":
        turns.half.release_session("default", "s")
    else:
        turns.half.reset_cache()
    preempted.num_preemptions, preempted.num_computed_tokens, preempted.status = 1, 0, RequestStatus.PREEMPTED
    turns.engine.step()
    for waiting in (request, preempted):
        assert turns.engine.admit(waiting, turns.hit(waiting)) is None
        assert waiting.block_hashes == exact_hashes(waiting)
        assert turns.hit(waiting) == BLOCK
    assert not turns.carries()


def test_after_the_last_request_of_a_session_nothing_is_carried() -> None:
    turns = Turns()
    turns.end(turns.begin(FIRST), ANSWER)
    assert turns.carries()
    turns.end(turns.begin([8] * 50, agent="critic", segments=[], release=True), [1])
    assert not turns.carries()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("fault", ["", "it broke"])
def test_after_a_load_that_failed_the_lineage_finds_nothing_of_it(fault: str, early: bool) -> None:
    """``early``: vLLM ends the request before it hands out what the workers say."""
    turns = Turns()
    request = turns.arrive(FIRST)
    assert turns.engine.admit(request, turns.hit(request))
    meta = turns.engine.prefill(request)
    report = WorkerReport(loads={job.req_id: LoadResult(1, 1, fault) for job in meta.loads})
    if early:
        turns.half.note_loads(report)
    else:
        turns.half.update_connector_output(report)
    turns.end(request, ANSWER)
    assert turns.carries() == (not fault)
