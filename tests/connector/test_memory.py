"""What the index keeps, for whom, and for how long."""

from __future__ import annotations

import random

from kvcomm_integrations.config import Isolation
from kvcomm_integrations.connector.metadata import WorkerReport
from kvcomm_integrations.planning.content_keys import ContentKey
from kvcomm_integrations.planning.entries import Reservation
from kvcomm_integrations.planning.reference_index import ACKNOWLEDGE_STEPS, ReferenceIndex
from kvcomm_integrations.reuse.edge import Edge
from tests.connector.standins import BYTES_PER_TOKEN, Engine, make_half, make_request, segment
from tests.planning.test_reference_index import names, reserve


def prompt_of(seed: int, tokens: int = 20) -> list[int]:
    rnd = random.Random(seed)
    return [rnd.randrange(900) for _ in range(tokens)]


def ask(engine: Engine, content: list[int], **params: object) -> dict[str, object]:
    prompt = [*range(1000, 1010), *content, 2000, 2001]
    request = make_request(
        prompt, {"agent": "a", "segments": [segment("placeholder", 10, 10 + len(content), "q")], **params}
    )
    return engine.run(request, [1, 2, 3])[1]


# ---- eviction ---------------------------------------------------------------------------------------------------


def test_what_is_used_often_stays_though_others_are_newer() -> None:
    index = ReferenceIndex(40, 1, 1)
    for name in "abcd":
        reserve(index, name, 10)
    for _ in range(5):
        index.touch(index.entries()[names(index).index("a")])
    for name in "efgh":
        reserve(index, name, 10)
    assert "a" in names(index)


def test_what_was_popular_once_goes_in_the_end() -> None:
    index = ReferenceIndex(20, 1, 1)
    for name in ("once", "x"):
        reserve(index, name, 10)
    for _ in range(5):
        index.touch(index.entries()[names(index).index("once")])
    for number in range(20):
        reserve(index, f"new {number}", 10)
        index.touch(index.entries()[-1])
    assert "once" not in names(index)


def test_of_equal_use_the_longer_saves_more_per_byte() -> None:
    index = ReferenceIndex(6000, 1, 1)
    reserve(index, "long", 4000)
    reserve(index, "short", 2000)
    reserve(index, "new", 1000)
    assert names(index) == ["long", "new"]


def test_sessions_with_live_requests_go_last() -> None:
    index = ReferenceIndex(20, 1, 1)
    reserve(index, "live", 10, scope="live")
    reserve(index, "idle", 10, scope="idle")
    for _ in range(9):
        index.touch(index.entries()[names(index).index("idle")])
    index.scopes.enter("live", 0.0)
    reserve(index, "new", 10, scope="other")
    assert names(index) == ["live", "new"]
    index.scopes.leave("live", 0.0)
    reserve(index, "newer", 20, scope="other")
    assert names(index) == ["newer"]


# ---- shares -----------------------------------------------------------------------------------------------------


def test_a_tenant_cannot_evict_another_beyond_its_share() -> None:
    index = ReferenceIndex(100, 1, 1, tenant_share=0.5)
    for number in range(5):
        entry = index.reserve(Reservation(ContentKey("v", str(number)), 10, "", "", dense=True, tenant="victim"))
        assert entry is not None
        index.acknowledge(entry.ref_id, 1)
    for number in range(50):
        entry = index.reserve(Reservation(ContentKey("a", str(number)), 10, "", "", dense=True, tenant="attacker"))
        assert entry is not None
        index.acknowledge(entry.ref_id, 1)
        assert index.tenant_bytes("attacker") <= 50
    assert index.tenant_bytes("victim") == 50
    assert index.reserve(Reservation(ContentKey("a", "big"), 51, "", "", dense=True, tenant="attacker")) is None
    index.clear()
    assert index.tenant_bytes("victim") == 0 and not index._by_tenant


# ---- sessions ---------------------------------------------------------------------------------------------------


def test_idle_sessions_lose_their_contents() -> None:
    now = [0.0]
    half = make_half(session_ttl_s=100.0)
    half.index.clock = lambda: now[0]
    engine = Engine(half)
    ask(engine, prompt_of(1), session="old")
    now[0] = 60.0
    ask(engine, prompt_of(2), session="new")
    assert len(half.index) == 3  # and the beginning that they share
    now[0] = 120.0
    engine.step()
    assert [e.key.scope for e in half.index.entries() if "old" in e.key.scope] == []
    now[0] = 1000.0
    meta = engine.step()
    assert len(half.index) == 0 and len(half.index.scopes) == 0
    assert len(meta.drops) == 2
    assert half.index.expired == 3


def test_a_live_request_keeps_its_session() -> None:
    now = [0.0]
    half = make_half(session_ttl_s=100.0)
    half.index.clock = lambda: now[0]
    engine = Engine(half)
    ask(engine, prompt_of(1), session="s")
    waiting = make_request([*range(50)], {"session": "s"})
    half.on_new_request(waiting)
    now[0] = 1000.0
    engine.step()
    assert any('"s"' in e.key.scope for e in half.index.entries())
    half.request_finished(waiting, [])
    now[0] = 2000.0
    engine.step()
    assert len(half.index) == 0


def test_the_last_request_of_a_session_releases_it() -> None:
    half = make_half()
    engine = Engine(half)
    content = prompt_of(1)
    for session in ("s", "r"):
        ask(engine, content, session=session, response_name="agent:a:response")
    meta_before = len(half.index)
    ask(engine, content, session="s", release=True, response_name="agent:a:response")
    assert all('"s"' not in e.key.scope for e in half.index.entries())
    assert any('"r"' in e.key.scope for e in half.index.entries())
    assert len(half.index) < meta_before


def test_a_release_needs_the_salt_and_the_tenant_of_the_session() -> None:
    half = make_half()
    engine = Engine(half)
    content = prompt_of(1)
    ask(engine, content, session="s", tenant="victim")
    held = len(half.index)
    ask(engine, content, session="s", tenant="attacker", release=True, mode="dense")
    assert len(half.index) == held
    salted = make_request([5, 6, 7], {"session": "s", "tenant": "victim", "release": True}, salt="other")
    engine.run(salted, [1])
    assert len(half.index) == held
    engine.run(make_request([5, 6, 7], {"session": "s", "tenant": "victim", "release": True}), [1])
    assert len(half.index) < held


def test_what_sessions_share_is_not_released_by_one() -> None:
    half = make_half(isolation=Isolation.TENANT)
    engine = Engine(half)
    ask(engine, prompt_of(1), session="s")
    held = len(half.index)
    engine.run(make_request([5, 6, 7], {"session": "s", "release": True}), [1])
    assert len(half.index) == held


# ---- lost answers ---------------------------------------------------------------------------------------------------


def test_a_lost_acknowledgement_ends_in_a_new_reservation() -> None:
    half = make_half()
    engine = Engine(half)
    content = prompt_of(1)
    prompt = [*range(1000, 1010), *content, 2000, 2001]
    params = {"agent": "a", "segments": [segment("placeholder", 10, 30, "q")]}
    first = make_request(prompt, params)
    half.on_new_request(first)
    engine.admit(first)
    engine.prefill(first)
    harvest = engine.step()
    assert harvest.harvests
    engine.finish(first, [1])
    waiting = make_request(prompt, {**params, "agent": "b"})
    half.on_new_request(waiting)
    assert half.get_num_new_matched_tokens(waiting, 0) is None
    drops: list[int] = []
    for _ in range(ACKNOWLEDGE_STEPS + 1):
        drops += engine.step().drops
    assert sorted(drops) == sorted(job.ref_id for job in harvest.harvests)
    assert half.index.lost == len(drops) and half.index.used == 0
    assert half.get_num_new_matched_tokens(waiting, 0) == 0
    half.update_connector_output(
        WorkerReport(stored={job.ref_id: 1 for job in harvest.harvests})
    )  # comes after all: too late
    assert half.index.used == 0


# ---- learned state ---------------------------------------------------------------------------------------------------


def test_template_text_matures_where_nothing_repairs_it() -> None:
    """Or requests would be run densely to teach it for ever."""
    half = make_half(repair=False, learn_rate=1.0, mature_examples=2, policy="kvcomm")
    engine = Engine(half)
    reports, lessons = [], 0
    for number in range(12):
        content = prompt_of(7)
        prompt = [*range(1000, 1010), *content, *range(2000, 2010), *prompt_of(8), 3000]
        segments = [segment("placeholder", 10, 30, "q"), segment("placeholder", 40, 60, "r")]
        request = make_request(prompt, {"agent": "a", "segments": segments})
        half.on_new_request(request)
        assert engine.admit(request) is not None
        engine.obey(engine.prefill(request))
        meta = engine.step()
        engine.obey(meta)
        for job in meta.observes:
            lessons += 1
            count = half.edges.examples(job.policy, job.edge) + 1
            half.update_connector_output(WorkerReport(examples={(job.policy, job.edge): count}))
        _, out = engine.finish(request, [1, 2])
        engine.obey(engine.step())
        reports.append(out["kvcomm"])
        assert number < 6 or reports[-1]["reason"] != "learning"
    assert lessons
    assert reports[-1]["loaded"] > 40  # the text between the contents too


def test_a_forgotten_edge_is_not_mature_any_more() -> None:
    half = make_half(policy="ridge")
    known = Edge("a", "b", "q")
    half.update_connector_output(WorkerReport(examples={("ridge", known): 9}))
    assert half.edges.examples("ridge", known) == 9
    half.update_connector_output(WorkerReport(examples={("ridge", known): 0}))
    assert half.edges.examples("ridge", known) == 0


def test_nothing_grows_without_end() -> None:
    """Thousands of sessions, tenants and agents: what the scheduler half remembers stays bounded."""
    half = make_half(store_bytes=300 * BYTES_PER_TOKEN, session_ttl_s=1e9)
    engine = Engine(half)
    rnd = random.Random(5)
    sizes = []
    for number in range(1500):
        ask(engine, prompt_of(number), session=f"s{number}", tenant=f"t{number % 700}", agent=f"a{number}")
        engine.tables.clear()
        index = half.index
        sizes.append(
            len(index)
            + len(index.scopes)
            + len(index._by_tenant)
            + len(index._due)
            + len(index._ngrams)
            + len(half._live)
            + len(half._others)
            + len(half._finished)
            + len(half.edges)
        )
        if rnd.random() < 0.1:
            engine.step()
    assert max(sizes[200:]) <= max(sizes[:200])
