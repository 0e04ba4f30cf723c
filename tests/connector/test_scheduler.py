"""Single situations of the scheduler half, each once a fault or easily made one."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvcomm_integrations.config import Isolation, ReuseConfig
from kvcomm_integrations.connector.metadata import WorkerReport
from kvcomm_integrations.planning.edge_table import EdgeTable
from kvcomm_integrations.planning.jobs import LoadResult
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.traits import POLICY_NAMES
from tests.connector.standins import BLOCK, Engine, exact_hashes, make_half, make_request, segment

GLUE = [1, 2, 3, 4, 5, 6]
QUESTION = list(range(100, 150))
TAIL = [7, 8, 9]


def prompt_of(system: list[int], content: list[int] = QUESTION) -> tuple[list[int], list[dict[str, Any]]]:
    start = len(system)
    return [*system, *content, *TAIL], [segment("placeholder", start, start + len(content), "user_question")]


def ask(system: list[int] = GLUE, content: list[int] = QUESTION, *, salt: str | None = None, **params: Any) -> Any:
    prompt, segments = prompt_of(system, content)
    return make_request(prompt, {"segments": segments, "agent": f"a{system[0]}", **params}, salt=salt)


def other(number: int, length: int = 9) -> list[int]:
    """Another agent's template text."""
    return [1000 * number + i for i in range(length)]


def test_a_second_agent_loads_what_the_first_has_computed() -> None:
    engine = Engine(make_half())
    _, first = engine.run(ask(), [40, 41, 42, 43, 44, 45])
    meta, second = engine.run(ask(other(1)), [40, 41])
    assert first["loaded"] == 0
    assert second["loaded"] == len(QUESTION) - 4
    assert second["repaired"] == 9 + 4
    assert sum(second[k] for k in ("exact", "loaded", "repaired", "computed")) == second["prompt_tokens"]
    (job,) = meta.loads
    assert [(s.start, s.end, s.offset) for s in job.spans] == [(13, 59, 4)]
    assert job.gaps == ((0, 13),) and len(job.token_ids) == 59


def test_a_response_is_found_whole_and_in_part() -> None:
    engine = Engine(make_half())
    answer = [500 + i for i in range(30)]
    engine.run(ask(response_name="agent:a:response"), [*answer, 0])
    for content, held in ((answer, 29 + 1), (answer[5:25], 20)):
        _, report = engine.run(ask(other(2), content), [1])
        assert report["segments"][1]["loaded"] == held - min(4, len(content) // 2)


def test_a_quoted_part_of_an_earlier_prompt_is_found() -> None:
    engine = Engine(make_half())
    engine.run(ask(), [1])
    _, report = engine.run(ask(other(2), QUESTION[10:40]), [1])
    assert report["segments"][1]["loaded"] == 30 - 4
    _, report = engine.run(ask(other(3), [*QUESTION[10:39], 999]), [1])
    assert report["segments"][1]["loaded"] == 0


@pytest.mark.parametrize("way", ["reset", "session", "disabled"])
@pytest.mark.parametrize("when", ["prefill", "finished"])
def test_nothing_forgotten_is_harvested(way: str, when: str) -> None:
    """Workers drop before they harvest: a harvest of a forgotten reference would stay in their store for good."""
    half = make_half()
    engine = Engine(half)
    request = ask(response_name="r", session="s")
    half.on_new_request(request)
    engine.admit(request)
    engine.prefill(request)
    if when == "finished":
        engine.obey(engine.step())
        kept, _ = engine.finish(request, list(range(300, 320)))
        assert kept
    assert len(half.index)
    if way == "reset":
        half.reset_cache()
    elif way == "session":
        half.release_session("default", "s")
    else:
        half.update_connector_output(WorkerReport(disabled="no"))
    meta = engine.step()
    held = {entry.ref_id for entry in half.index.entries()}
    assert {job.ref_id for job in meta.harvests} <= held
    assert meta.releases == ([request.request_id] if when == "finished" else [])


def test_nothing_forgotten_is_learned_from() -> None:
    half = make_half(learn_rate=1.0)
    engine = Engine(half)
    engine.run(ask(), [1])
    request = ask(other(1))
    half.on_new_request(request)
    assert engine.admit(request) == 0
    engine.prefill(request)
    half.reset_cache()
    assert engine.step().observes == []


NAMES = [
    (("", "t", "s|x"), ("", "t|s", "x")),
    (("", "t", "s"), ("t", "s", "")),
    (("a|b", "c", "d"), ("a", "b|c", "d")),
    (("", 't", "s', "x"), ("", "t", 's", "x')),
]


@pytest.mark.parametrize(("mine", "theirs"), NAMES)
@pytest.mark.parametrize("isolation", [Isolation.SESSION, Isolation.TENANT])
def test_no_choice_of_names_reaches_another_tenants_contents(
    mine: tuple[str, str, str], theirs: tuple[str, str, str], isolation: Isolation
) -> None:
    engine = Engine(make_half(isolation=isolation))
    salt, tenant, session = mine
    engine.run(ask(salt=salt or None, tenant=tenant, session=session), [1])
    salt, tenant, session = theirs
    meta, report = engine.run(ask(other(1), salt=salt or None, tenant=tenant, session=session), [1])
    assert report["loaded"] == 0 and meta.loads == []
    meta, report = engine.run(ask(other(2), salt=salt or None, tenant=tenant, session=session), [1])
    assert report["loaded"] > 0  # its own


def test_releasing_a_session_releases_nothing_else() -> None:
    half = make_half()
    engine = Engine(half)
    for tenant, session in (("t", "s"), ("t", "r"), ("u|t", "s"), ("u", "s")):
        engine.run(ask(other(1), tenant=tenant, session=session, agent="s"), [1])
    before = len(half.index)
    assert half.release_session("t", "s") == 1
    assert len(half.index) == before - 1
    assert half.release_session("t", "s") == 0


def test_asking_twice_in_one_step_gives_the_same_answer_and_one_load() -> None:
    half = make_half()
    engine = Engine(half)
    engine.run(ask(), [1])
    for request in (ask(other(1)), ask(GLUE, list(range(700, 740)))):  # approximate; an exact copy of the beginning
        half.on_new_request(request)
        first = half.get_num_new_matched_tokens(request, 0)
        assert engine.admit(request) == first and first
        meta = engine.prefill(request)
        assert len(meta.loads) == 1
        engine.obey(meta)
        assert engine.finish(request, [1])[1]["kvcomm"]["reason"] == ""


def test_a_plan_that_got_no_blocks_leaves_nothing_behind() -> None:
    half = make_half()
    engine = Engine(half)
    engine.run(ask(), [1])
    request = ask(other(1))
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0)
    assert request.block_hashes != exact_hashes(request)
    assert engine.step().loads == []
    assert request.block_hashes == exact_hashes(request)
    assert engine.admit(request)
    assert len(engine.prefill(request).loads) == 1


def test_requests_beyond_one_repair_pass_wait_and_get_theirs() -> None:
    half = make_half(max_repair_tokens=20)
    engine = Engine(half)
    engine.run(ask(), [1])
    requests = [ask(other(n)) for n in (1, 2)]
    for request in requests:
        half.on_new_request(request)
    assert engine.admit(requests[0])
    assert half.get_num_new_matched_tokens(requests[1], 0) is None
    engine.prefill(requests[0])
    assert engine.admit(requests[1])


def test_a_plan_that_was_dropped_gives_its_share_of_the_repair_pass_back() -> None:
    half = make_half(max_repair_tokens=20)
    engine = Engine(half)
    engine.run(ask(), [1])
    requests = [ask(other(n)) for n in (1, 2)]
    for request in requests:
        half.on_new_request(request)
    assert half.get_num_new_matched_tokens(requests[0], 0)
    engine.allocate(requests[0], 0)  # vLLM took nothing
    assert requests[0].block_hashes == exact_hashes(requests[0])
    assert engine.admit(requests[1])


def test_waiting_for_another_requests_prefill_ends() -> None:
    half = make_half()
    engine = Engine(half)
    owner, waiter = ask(), ask(other(1))
    half.on_new_request(owner)
    half.on_new_request(waiter)
    assert engine.admit(owner) is not None
    assert half.get_num_new_matched_tokens(waiter, 0) is None
    meta = engine.prefill(owner)
    assert half.get_num_new_matched_tokens(waiter, 0) is None
    meta = engine.step()
    assert half.get_num_new_matched_tokens(waiter, 0) is None
    engine.obey(meta)
    assert half.get_num_new_matched_tokens(waiter, 0)


@pytest.mark.parametrize("end", ["abort", "preempt", "fail"])
def test_nobody_waits_for_a_broken_promise(end: str) -> None:
    half = make_half()
    engine = Engine(half)
    owner, waiter = ask(), ask(other(1))
    half.on_new_request(owner)
    half.on_new_request(waiter)
    engine.admit(owner)
    engine.prefill(owner)
    assert half.get_num_new_matched_tokens(waiter, 0) is None
    if end == "abort":
        owner.status = RequestStatus.FINISHED_ABORTED
        assert half.request_finished(owner, [1])[0] is False
    elif end == "preempt":
        owner.num_preemptions, owner.num_computed_tokens, owner.status = 1, 0, RequestStatus.PREEMPTED
        assert engine.step().harvests == []
    else:
        meta = engine.step()
        assert meta.harvests
        half.update_connector_output(WorkerReport(failed={job.ref_id: "full" for job in meta.harvests}))
    assert half.get_num_new_matched_tokens(waiter, 0) == 0


def test_no_one_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    half = make_half()
    engine = Engine(half)
    owner, waiter = ask(), ask(other(1))
    half.on_new_request(owner)
    half.on_new_request(waiter)
    engine.admit(owner)
    assert half.get_num_new_matched_tokens(waiter, 0) is None
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert half.get_num_new_matched_tokens(waiter, 0) == 0


def test_a_preempted_request_keeps_apart_and_reports_only_what_is_exact() -> None:
    half = make_half()
    engine = Engine(half)
    engine.run(ask(), [1])
    request = ask(other(1, 2 * BLOCK + 2))
    half.on_new_request(request)
    assert engine.admit(request)
    engine.obey(engine.prefill(request))
    request.num_preemptions, request.num_computed_tokens, request.status = 1, 0, RequestStatus.PREEMPTED
    engine.step()
    assert engine.admit(request, exact=4 * BLOCK) == 0  # its own hidden blocks are still there
    assert request.block_hashes[:2] == exact_hashes(request)[:2]
    assert not set(request.block_hashes[2:]) & set(exact_hashes(request))
    assert engine.prefill(request).loads == []
    _, out = engine.finish(request, [1, 2])
    assert out["kvcomm"]["exact"] == 2 * BLOCK
    assert out["kvcomm"]["loaded"] == 0
    assert out["kvcomm"]["reason"] == "preempted, then computed"


def test_a_request_that_ends_while_preempted_has_no_blocks_to_keep() -> None:
    half = make_half()
    engine = Engine(half)
    request = ask(response_name="r")
    half.on_new_request(request)
    engine.admit(request)
    engine.prefill(request)
    request.num_preemptions, request.num_computed_tokens = 1, 0
    request.append_output_token_ids(list(range(300, 320)))
    request.status = RequestStatus.FINISHED_STOPPED
    assert half.request_finished(request, [])[0] is False
    meta = engine.step()
    assert (meta.harvests, meta.releases, len(half.index)) == ([], [], 0)


def test_a_fault_while_loading_is_reported_as_dense() -> None:
    half = make_half()
    engine = Engine(half)
    engine.run(ask(), [1])
    request = ask(other(1))
    half.on_new_request(request)
    engine.admit(request)
    meta = engine.prefill(request)
    half.update_connector_output(WorkerReport(loads={meta.loads[0].req_id: LoadResult(1, 1, "KeyError: 1")}))
    _, out = engine.finish(request, [1])
    report = out["kvcomm"]
    assert (report["loaded"], report["repaired"], report["mode"]) == (0, 0, "dense")
    assert report["computed"] == report["prompt_tokens"]
    assert "KeyError" in report["reason"]


def test_a_fault_while_planning_costs_the_reuse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    half = make_half()
    engine = Engine(half)
    engine.run(ask(), [1])
    request = ask(other(1))
    half.on_new_request(request)
    monkeypatch.setattr(half.index, "touch", lambda entry: 1 / 0)
    assert engine.admit(request) == 0
    assert request.block_hashes == exact_hashes(request)
    assert engine.prefill(request).loads == []
    assert "planning failed" in engine.finish(request, [1])[1]["kvcomm"]["reason"]


def test_a_hit_that_is_still_being_written_is_waited_for() -> None:
    half = make_half()
    engine = Engine(half)
    engine.run(ask(), [1])
    system = other(1, 2 * BLOCK)
    plain = make_request([*system, *other(5, 50)])
    half.on_new_request(plain)
    plain.status = RequestStatus.RUNNING  # scheduled in this very step, its blocks are filed but not computed
    request = ask(system)
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 2 * BLOCK) is None
    plain.num_computed_tokens = 2 * BLOCK
    assert half.get_num_new_matched_tokens(request, 2 * BLOCK)


def test_without_repair_a_mature_edge_loads_from_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever had to be repaired would end the plan, so nothing at all would be loaded under pipeline parallelism."""
    half = make_half(repair=False, mature_examples=2)
    engine, lessons, observes = Engine(half), list[Any](), half._observes
    monkeypatch.setattr(half, "_observes", lambda *order: lessons.extend(found := observes(*order)) or found)

    def both(number: int) -> Any:
        content = [100 * number + i for i in range(50)]
        engine.run(ask(GLUE, content), [1])
        return engine.run(ask(other(1), content), [1])[1]

    both(10)
    young = both(20)
    assert young["loaded"] == 0
    assert young["segments"][1]["reason"] == "no repair pass, and 0 of 2 examples"
    (edge,) = {lesson.edge for lesson in lessons if lesson.edge.name == "user_question"}
    half.update_connector_output(WorkerReport(examples={("ridge", edge): 2}))
    mature = both(30)
    assert mature["segments"][1]["loaded"] == 50
    assert mature["repaired"] == 0


def test_a_request_made_of_thousands_of_segments_does_not_stop_the_engine() -> None:
    half = make_half(repair=False)
    segments = [segment("placeholder" if i % 2 else "fixed", 5 * i, 5 * i + 5, f"n{i}") for i in range(4096)]
    request = make_request(list(range(5 * 4096 + 1)), {"segments": segments, "audit": ["kvcomm"]})
    half.on_new_request(request)
    started = time.perf_counter()
    assert half.get_num_new_matched_tokens(request, 0) == 0
    half.update_state_after_alloc(request, range(10), 0)
    request.status = RequestStatus.FINISHED_ABORTED
    half.request_finished(request, [])
    assert time.perf_counter() - started < 5


def test_the_edge_book_stays_small() -> None:
    book = EdgeTable(ReuseConfig(), limit=10)
    for number in range(50):
        edge = Edge("a", str(number), "q")
        book.audited("aligned", edge, 0.1)
        book.learned("ridge", edge, 1)
    assert len(book) == 10
    assert len(book._health) == 10
    assert book.examples("ridge", Edge("a", "49", "q")) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_request": SimpleNamespace()},
        {"mm_features": [SimpleNamespace()]},
        {"prompt_embeds": SimpleNamespace()},
        {"resumable": True},
        {"skip_reading_prefix_cache": True},
    ],
)
def test_requests_of_other_kinds_are_served_densely(changes: dict[str, Any]) -> None:
    half = make_half()
    engine = Engine(half)
    engine.run(ask(), [1])
    request = ask(other(1))
    for name, value in changes.items():
        setattr(request, name, value)
    half.on_new_request(request)
    assert engine.admit(request) == 0
    assert engine.prefill(request).loads == []
    kept, out = engine.finish(request, [1])
    assert not kept and out["kvcomm"]["reason"]


@pytest.mark.parametrize("policy", sorted({*POLICY_NAMES} - {"cacheblend"}))
def test_the_last_token_is_computed_under_every_policy(policy: str) -> None:
    """vLLM needs the prompt's last token for its logits; an answer's last token was sampled and never computed."""
    engine = Engine(make_half())
    answer = [500 + i for i in range(30)]
    engine.run(ask(response_name="r"), [*answer, 0])
    for content, held in ((QUESTION, len(QUESTION)), (answer, len(answer))):
        system = other(1 + held)
        prompt = [*system, *content]
        segments = [segment("placeholder", len(system), len(prompt), "r")]
        params = {"segments": segments, "agent": "b", "policy": policy}
        meta, report = engine.run(make_request(prompt, params), [1])
        (job,) = meta.loads
        assert job.spans[-1].end == job.end == len(prompt) - 1
        assert report["loaded"] > 0 and report["computed"] == 1


@pytest.mark.parametrize("engine_wide", [True, False])
def test_a_policy_that_can_only_be_compared_runs_densely_and_says_why(engine_wide: bool) -> None:
    engine = Engine(make_half(policy="cacheblend") if engine_wide else make_half())
    engine.run(ask(), [1])
    meta, report = engine.run(ask(other(1), **({} if engine_wide else {"policy": "cacheblend"})), [1])
    assert meta.loads == [] and report["loaded"] == 0
    assert "'cacheblend' runs densely" in report["reason"] and "kvcomm bench fidelity" in report["reason"]


def test_only_configured_variants_of_policies_may_be_named() -> None:
    """Each keeps state of its own on the workers: requests must not be able to make up more of them."""
    engine = Engine(make_half(variants=("kvcmas:rank=4",)))
    for policy, fine in (("kvcmas:rank=4", True), ("kvcmas", True), ("kvcmas:rank=5", False)):
        for params in ({"policy": policy}, {"mode": "observe", "audit": [policy]}):
            _, report = engine.run(ask(other(len(policy)), **params), [1])
            assert ("variants" in report["reason"]) is not fine, report["reason"]
