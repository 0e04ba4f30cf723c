"""Which reference a content is loaded from: the producer's, the first consumer's, or the previous consumer's."""

from __future__ import annotations

from typing import Any

from kvcomm_integrations.connector.metadata import WorkerReport
from tests.connector.standins import Engine, make_half, make_request, segment
from tests.connector.test_scheduler import QUESTION, ask, other

CHAIN = "chain: previous consumer ran dense"


def edge_of(report: dict[str, Any]) -> dict[str, Any]:
    found = report["segments"][1]["edge"]
    assert found is not None
    return found


def learn(engine: Engine, number: int, **params: Any) -> Any:
    """A dense request of agent ``number``; the edges it teaches, as (source, target)."""
    request = ask(other(number), mode="observe", **params)
    engine.half.on_new_request(request)
    engine.admit(request)
    engine.prefill(request)
    meta = engine.step()
    engine.obey(meta)
    engine.finish(request, [1])
    engine.obey(engine.step())
    return [(job.edge.source, job.edge.target) for job in meta.observes if job.edge.name == "user_question"]


def test_without_chains_the_first_consumer_is_taken_whoever_came_between() -> None:
    engine = Engine(make_half())
    learn(engine, 1)
    assert learn(engine, 2) == [("a1000", "a2000")]
    assert learn(engine, 3) == [("a1000", "a3000")]
    _, report = engine.run(ask(other(4)), [1])
    assert (edge_of(report)["source"], edge_of(report)["reference"]) == ("a1000", "first dense consumer")
    assert len([entry for entry in engine.half.index.entries() if entry.reserved.name == "user_question"]) == 1


def test_a_chain_takes_the_previous_consumer_while_it_ran_dense() -> None:
    engine = Engine(make_half(policy="kvcmas"))
    learn(engine, 1)
    assert learn(engine, 2) == [("a1000", "a2000")]
    assert learn(engine, 3) == [("a2000", "a3000")]
    meta, report = engine.run(ask(other(4)), [1])
    assert (edge_of(report)["source"], edge_of(report)["reference"]) == ("a3000", CHAIN)
    (job,) = meta.loads
    assert [span.edge.source for span in job.spans if span.edge.name == "user_question"] == ["a3000"]
    _, report = engine.run(ask(other(5)), [1])  # agent 4 was reused: its cache is an estimate
    assert edge_of(report)["source"] == "a1000"
    assert edge_of(report)["reference"] == "first dense consumer; the previous consumer was reused itself"
    learn(engine, 6)
    _, report = engine.run(ask(other(7)), [1])
    assert (edge_of(report)["source"], edge_of(report)["reference"]) == ("a6000", CHAIN)


def test_the_setting_overrules_the_policy() -> None:
    engine = Engine(make_half(policy="ridge", chain=True))
    assert [learn(engine, n) for n in (1, 2, 3)] == [[], [("a1000", "a2000")], [("a2000", "a3000")]]
    engine = Engine(make_half(policy="kvcmas", chain=False))
    assert [learn(engine, n) for n in (1, 2, 3)] == [[], [("a1000", "a2000")], [("a1000", "a3000")]]


def test_an_answer_comes_from_its_producer_until_somebody_has_read_it() -> None:
    answer = [500 + i for i in range(30)]
    engine = Engine(make_half(policy="kvcmas"))
    engine.run(ask(other(1), mode="observe", response_name="r"), [*answer, 0])
    _, report = engine.run(ask(other(2), answer), [1])
    assert (edge_of(report)["source"], edge_of(report)["reference"]) == ("a1000", "producer")
    engine.run(ask(other(3), answer, mode="observe"), [1])
    _, report = engine.run(ask(other(4), answer), [1])
    assert (edge_of(report)["source"], edge_of(report)["reference"]) == ("a3000", CHAIN)


def test_the_first_dense_consumer_takes_over_from_one_that_was_reused_in_part() -> None:
    """A content that first came up beside loaded ones was computed over estimates."""
    engine = Engine(make_half())
    learn(engine, 1)
    fresh = list(range(700, 750))
    prompt = [*other(2), *QUESTION, 5, *fresh, 7, 8, 9]
    segments = [segment("placeholder", 9, 59, "user_question"), segment("placeholder", 60, 110, "tool:t:result")]
    _, report = engine.run(make_request(prompt, {"segments": segments, "agent": "b"}), [1])
    assert report["loaded"] and report["segments"][3]["computed"]
    _, report = engine.run(ask(other(3), fresh), [1])
    assert (edge_of(report)["source"], edge_of(report)["reference"]) == ("b", "first consumer, reused itself in part")
    engine.run(ask(other(4), fresh, mode="observe"), [1])
    for number in (5, 6):
        _, report = engine.run(ask(other(number), fresh), [1])
        assert (edge_of(report)["source"], edge_of(report)["reference"]) == ("a4000", "first dense consumer")
        engine.run(ask(other(10 + number), fresh, mode="observe"), [1])


def test_a_link_that_is_not_held_falls_back_to_the_first_reference() -> None:
    engine = Engine(make_half(policy="kvcmas"))
    learn(engine, 1)
    request = ask(other(2), mode="observe")
    engine.half.on_new_request(request)
    engine.admit(request)
    engine.prefill(request)
    meta = engine.step()
    engine.half.update_connector_output(WorkerReport(failed={job.ref_id: "full" for job in meta.harvests}))
    _, report = engine.run(ask(other(3)), [1])
    assert edge_of(report)["source"] == "a1000"
    assert edge_of(report)["reference"].endswith("the previous consumer's reference is not held")


def test_links_are_released_with_their_session() -> None:
    engine = Engine(make_half(policy="kvcmas"))
    for number in (1, 2, 3):
        learn(engine, number, session="s")
    contents = [entry for entry in engine.half.index.entries() if entry.reserved.name == "user_question"]
    assert [entry.key.consumer for entry in contents] == ["", "a2000", "a3000"]
    assert engine.half.release_session("default", "s") == 3


def test_an_agent_that_asks_again_is_not_its_own_link() -> None:
    engine = Engine(make_half(policy="kvcmas"))
    learn(engine, 1)
    learn(engine, 2)
    request = ask([*other(2), 77], QUESTION, agent="a2000")
    _, report = engine.run(request, [1])
    assert edge_of(report)["source"] == "a1000"
