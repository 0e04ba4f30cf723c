"""Shadow requests on the scheduler's side: when they begin, that they give way, what they leave, and to whom."""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from kvcomm_integrations.connector.metadata import WorkerReport
from kvcomm_integrations.connector.shadows import LEAST_TOKENS
from kvcomm_integrations.planning.jobs import LoadResult
from kvcomm_integrations.wire import WIRE_KEY
from tests.connector.standins import BLOCK, Engine, exact_hashes, make_half, make_request, segment

QUESTION = list(range(100, 148))


class FakeCore:
    """An engine that keeps what is submitted until the test lets it arrive."""

    steps_ahead = 1
    open = True

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.submitted: list[Request] = []
        self.arrived: list[Request] = []
        self.ended: list[str] = []
        self.limit: int | None = None

    def submit(self, request_id: str, token_ids: list[int], salt: str | None, params: dict[str, Any]) -> None:
        self.submitted.append(make_request(token_ids, params[WIRE_KEY], salt=salt, request_id=request_id, max_tokens=1))

    def arrive(self) -> Request:
        request = self.submitted.pop()
        self.arrived.append(request)
        self.engine.half.on_new_request(request)
        return request

    def end(self, request_id: str) -> None:
        self.ended.append(request_id)
        [request] = [request for request in self.arrived if request.request_id == request_id]
        self.arrived.remove(request)
        request.status = RequestStatus.FINISHED_ABORTED
        self.engine.half.request_finished(request, list(self.engine.tables.get(request_id, ())))

    def limit_steps(self, tokens: int | None) -> None:
        self.limit = tokens

    def wait(self, seconds: float = 2.0) -> bool:
        """Whether something is submitted within so long."""
        until = time.monotonic() + seconds
        while not self.submitted and time.monotonic() < until:
            time.sleep(0.005)
        return bool(self.submitted)


def world(**options: Any) -> tuple[Engine, FakeCore]:
    engine = Engine(make_half(**{"idle_after_ms": 10.0, **options}))
    core = FakeCore(engine)
    engine.half.shadows.core = core
    return engine, core


def ask(agent: str, *, question: list[int] = QUESTION, **more: Any) -> Request:
    prompt = [ord(agent[0])] * 20 + question + [7] * 5
    params = {
        "agent": agent, "session": "s", "tenant": "t",
        "segments": [segment("placeholder", 20, 20 + len(question), "question")], **more,
    }  # fmt: skip
    return make_request(prompt, params, salt="salt")


def two_agents(engine: Engine) -> dict[str, Any]:
    """The first computes a content, the second loads it; the second's report."""
    engine.run(ask("planner"), [1, 2])
    _, report = engine.run(ask("solver"), [3, 4, 5])
    assert report["loaded"] > 0
    return report


def compute(engine: Engine, request: Request) -> Any:
    """Let a shadow request compute its prompt and its one token."""
    assert engine.admit(request) == 0
    meta = engine.prefill(request)
    kept, out = engine.finish(request, [9], status=RequestStatus.FINISHED_LENGTH_CAPPED)
    assert out is None and kept
    return meta


def orders(engine: Engine, steps: int = 12) -> list[Any]:
    """Steps without any user's request, obeyed."""
    metas = []
    for _ in range(steps):
        meta = engine.step()
        metas.append(meta)
        engine.obey(meta)
        if meta.sliced_audit is not None:
            engine.half.update_connector_output(WorkerReport(audit_over="another"))
            assert not engine.step().observes, "another's audit is over"
            engine.half.update_connector_output(WorkerReport(audit_over=meta.sliced_audit.req_id))
    return metas


def test_what_was_estimated_is_computed_again_once_nobody_has_asked_for_a_while() -> None:
    engine, core = world()
    engine.run(ask("planner"), [1, 2])
    assert not core.wait(0.1), "nothing was estimated"
    engine.run(ask("solver"), [3, 4, 5])
    assert core.wait()
    request = core.arrive()
    asked = ask("solver")
    assert list(request.prompt_token_ids or ()) == [*(asked.prompt_token_ids or ()), 3, 4]
    assert request.cache_salt == "salt" and core.limit == LEAST_TOKENS
    assert request.block_hashes == exact_hashes(request), "its blocks are exact"
    compute(engine, request)
    assert core.limit is None
    metas = orders(engine)
    audits = [meta.sliced_audit for meta in metas if meta.sliced_audit is not None]
    assert [(job.prompt_tokens, len(job.variants)) for job in audits] == [(asked.num_prompt_tokens, 1)]
    assert sum(len(meta.observes) for meta in metas) == 1
    assert all(len(meta.observes) + len(meta.harvests) + (meta.sliced_audit is not None) <= 1 for meta in metas)
    assert [name for meta in metas for name in meta.releases] == [request.request_id]
    assert not core.wait(0.1), "it is done with"


def test_the_next_turn_reports_what_is_settled() -> None:
    engine, core = world()
    two_agents(engine)
    core.wait()
    request = core.arrive()
    compute(engine, request)
    orders(engine)
    longer = make_request([*(request.prompt_token_ids or ()), *range(30)], {"agent": "solver", "session": "s"})
    longer.block_hashes[: len(request.block_hashes)] = request.block_hashes
    engine.half.on_new_request(longer)
    engine.admit(longer, len(request.block_hashes) * BLOCK)
    engine.prefill(longer)
    _, out = engine.finish(longer, [1])
    report = out[WIRE_KEY]
    assert report["settled"] == report["exact"] == len(request.block_hashes) * BLOCK > 0


def test_blocks_that_were_computed_again_since_are_not_called_settled() -> None:
    engine, core = world()
    two_agents(engine)
    core.wait()
    request = core.arrive()
    compute(engine, request)
    orders(engine)
    hashes = list(request.block_hashes)
    assert engine.half.lineages.settled(hashes) == len(hashes)
    engine.run(ask("solver", mode="dense"), [3, 4, 5])  # they were evicted: it has found nothing
    assert engine.half.lineages.settled(hashes) == 0


@pytest.mark.parametrize("moment", ["submitted", "waiting", "running", "auditing", "learning"])
def test_a_users_request_ends_it_at_any_moment_and_nothing_stays_behind(moment: str) -> None:
    engine, core = world()
    two_agents(engine)
    core.wait()
    entries = len(engine.half.index)
    user = ask("critic", question=list(range(300, 340)))
    if moment != "submitted":
        request = core.arrive()
    if moment == "running":
        engine.admit(request)
        request.num_computed_tokens = BLOCK
    if moment in ("auditing", "learning"):
        compute(engine, request)
        meta = engine.step()
        assert meta.sliced_audit is not None
        if moment == "learning":
            engine.half.update_connector_output(WorkerReport(audit_over=meta.sliced_audit.req_id))
            engine.obey(engine.step())
    engine.half.on_new_request(user)
    if moment == "submitted":
        request = core.arrive()
    assert core.limit is None
    if moment in ("auditing", "learning"):
        meta = engine.step()
        assert meta.abandon_audit and meta.releases == [request.request_id] and meta.sliced_audit is None
        assert meta.audit_tokens == 0
    else:
        assert core.ended == [request.request_id]
    assert len(engine.half.index) == entries, "its reservations are withdrawn"
    again = moment != "learning"
    assert len(engine.half.shadows.queue) == again, "it is tried again, unless it has taught something already"
    assert not engine.half.shadows.busy and not core.wait(0.1), "a user's request is being served"
    engine.admit(user)
    engine.prefill(user)
    engine.finish(user, [1, 2])
    assert core.wait(0.2) == again


def test_no_user_waits_for_a_content_that_only_a_shadow_request_was_computing() -> None:
    engine, core = world()
    two_agents(engine)
    engine.half.index.clear()
    core.wait()
    request = core.arrive()
    engine.admit(request)
    engine.half.on_new_request(user := ask("critic"))
    assert engine.admit(user) == 0


@pytest.mark.parametrize("change", ["release", "reset", "weights", "release in a request"])
def test_what_is_forgotten_is_not_computed_again(change: str) -> None:
    engine, core = world(idle_after_ms=500.0)
    two_agents(engine)
    if change == "release":
        engine.half.release_session("t", "s")
    elif change == "reset":
        engine.half.reset_cache()
    elif change == "weights":
        engine.half.update_connector_output(WorkerReport(weights=1))
    else:
        engine.run(ask("critic", question=list(range(300, 340)), release=True), [1, 2])
    assert not core.wait(1.0)


@pytest.mark.parametrize("moment", ["submitted", "running", "auditing"])
@pytest.mark.parametrize("change", ["release", "reset", "other"])
def test_what_is_being_computed_of_something_forgotten_leaves_nothing(moment: str, change: str) -> None:
    engine, core = world()
    two_agents(engine)
    core.wait()
    if moment != "submitted":
        request = core.arrive()
        engine.admit(request)
    if moment == "auditing":
        engine.prefill(request)
        engine.finish(request, [9], status=RequestStatus.FINISHED_LENGTH_CAPPED)
        assert engine.step().sliced_audit is not None
    if change == "reset":
        engine.half.reset_cache()
    else:
        engine.half.release_session("t", "s" if change == "release" else "another")
    if moment == "submitted":
        request = core.arrive()
    meta = engine.step()
    if change == "other":
        assert not meta.abandon_audit and not core.ended
        return
    assert meta.abandon_audit if moment == "auditing" else core.ended == [request.request_id]
    left = [entry for entry in map(engine.half.index.by_id, range(50)) if entry is not None]
    assert all(entry.reserved.exact for entry in left), "nothing but beginnings, which are no session's"
    assert not core.wait(0.1)


@pytest.mark.parametrize("options", [{"idle_budget": 0}, {"enabled": False}])
def test_who_wants_none_has_none(options: dict[str, Any]) -> None:
    engine, core = world(**options)
    engine.run(ask("planner"), [1, 2])
    engine.run(ask("solver"), [3, 4, 5])
    assert not core.wait(0.1) and not len(engine.half.shadows.queue)


def test_dense_requests_and_closed_engines_have_none() -> None:
    engine, core = world()
    engine.run(ask("planner"), [1, 2])
    engine.run(ask("solver", mode="dense"), [3, 4])
    engine.run(ask("solver", mode="observe"), [3, 4])
    assert not core.wait(0.1)
    core.open = False
    engine.run(ask("solver"), [3, 4])
    assert not core.wait(0.1) and len(engine.half.shadows.queue) == 1


def test_a_request_that_cannot_be_computed_is_given_up_after_some_tries() -> None:
    engine, core = world()
    two_agents(engine)
    tries = 0
    while core.wait(0.2):
        request = core.arrive()
        engine.admit(request)
        core.end(request.request_id)
        tries += 1
    assert tries == 3 and not len(engine.half.shadows.queue)


def test_slices_take_as_long_as_they_may() -> None:
    engine, core = world(idle_slice_ms=50.0)
    two_agents(engine)
    core.wait()
    now = [0.0]
    shadows = engine.half.shadows
    shadows._clock = lambda: now[0]
    request = core.arrive()
    assert core.limit == LEAST_TOKENS and shadows.slice_ms == 40
    engine.admit(request)

    def steps(count: int, ms_per_token: float) -> None:
        for _ in range(count):
            engine.step()
            now[0] += (10 + ms_per_token * (core.limit or 0)) / 1e3

    steps(40, 0.1)
    assert core.limit is not None and 240 <= core.limit <= 310
    steps(40, 3.0)  # later tokens attend to more
    assert 8 <= core.limit <= 11
    steps(40, 1000.0)
    assert core.limit == LEAST_TOKENS
    core.steps_ahead = 2
    assert shadows.slice_ms == 20


def test_a_long_example_is_learned_in_parts_and_a_long_content_is_left_to_users() -> None:
    content = list(range(1000, 1400))
    engine, core = world()
    engine.half.shadows._tokens = 7.9
    engine.run(ask("planner", question=content), [1, 2])
    engine.run(ask("solver", question=content), [3, 4, 5])
    core.wait()
    request = core.arrive()
    compute(engine, request)
    jobs = [job for meta in orders(engine, 20) for job in meta.observes]
    most = 16 * 7
    assert [job.tokens for job in jobs] == [most, most, most, 400 - 3 * most]
    assert [job.first for job in jobs] == [0, most, 2 * most, 3 * most]
    assert [(job.start, job.offset) for job in jobs] == [(20 + job.first, job.first) for job in jobs]


@pytest.mark.parametrize("learned", [0, 1])
def test_what_has_been_learned_once_is_not_learned_again(learned: int) -> None:
    engine, core = world()
    two_agents(engine)
    core.wait()
    compute(engine, core.arrive())
    orders(engine, 1 + learned)
    engine.half.on_new_request(ask("critic"))
    assert len(engine.half.shadows.queue) == 1 - learned


def test_its_audit_is_of_what_was_served_and_needs_what_that_was_loaded_from() -> None:
    engine, core = world()
    two_agents(engine)
    [held] = [entry for entry in (engine.half.index.by_id(n) for n in range(9)) if entry and entry.reserved.name]
    engine.half.index.withdraw(held.ref_id)
    core.wait()
    request = core.arrive()
    compute(engine, request)
    assert not any(meta.sliced_audit for meta in orders(engine))


def test_counters_tell_of_them_apart_from_users_requests() -> None:
    engine, core = world()
    two_agents(engine)
    engine.half.meter.take()
    core.wait()
    request = core.arrive()
    compute(engine, request)
    user = ask("critic")
    user.arrival_time = time.time() - 0.5
    engine.half.on_new_request(user)
    stats = engine.half.meter.take()
    assert stats is not None
    text = str(stats.data)
    assert "shadow_requests" in text and "done" in text and f"{request.num_prompt_tokens}" in text
    assert "vllm:kvcomm_requests" not in text and "shadow_delay" in text
    engine.half.update_connector_output(WorkerReport(loads={"none": LoadResult(1, 1)}))
