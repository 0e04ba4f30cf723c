"""Contents that stood in a row in one earlier prompt are loaded as one run, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest

from kvcomm_integrations.planning.contiguous import MAX_SEPARATOR
from kvcomm_integrations.planning.row import Row
from tests.connector.standins import Engine, make_half, make_request, segment

SYSTEM, OTHER, THIRD = ([base + i for i in range(9)] for base in (1000, 2000, 3000))
GLUE, CLOSE, STOP = [1, 2, 3, 4, 5], [7, 8, 9], 0
QUESTION, FIRST, SECOND, MORE = ([base + i for i in range(40)] for base in (100, 200, 300, 400))
DEPTH = 4


def prompt(agent: str, system: list[int], *parts: list[int], glue: list[int] = GLUE, **params: Any) -> Any:
    """A prompt that holds ``parts`` in a row, ``glue`` between any two of them and after the last."""
    ids, segments = list(system), []
    for number, part in enumerate(parts):
        segments.append(segment("placeholder", len(ids), len(ids) + len(part), f"content{number}"))
        ids += [*part, *glue]
    return make_request(ids, {"segments": segments, "agent": agent, "response_name": f"{agent}:response", **params})


def spans(meta: Any) -> list[tuple[int, int]]:
    """Loaded spans of the only load of a step, neighbours joined."""
    (job,) = meta.loads
    found: list[tuple[int, int]] = []
    for span in job.spans:
        if found and found[-1][1] == span.start:
            found[-1] = (found[-1][0], span.end)
        else:
            found.append((span.start, span.end))
    return found


def test_a_history_behind_another_system_prompt_is_one_run_from_one_source() -> None:
    engine = Engine(make_half())
    engine.run(prompt("x", SYSTEM, QUESTION), [*FIRST, STOP])
    engine.run(prompt("x", SYSTEM, QUESTION, FIRST, MORE), [*SECOND, STOP])
    meta, report = engine.run(prompt("y", OTHER, QUESTION, FIRST, MORE, SECOND), [5, STOP])
    assert spans(meta) == [(9 + DEPTH, 9 + 4 * 40 + 3 * 5)]
    assert meta.loads[0].gaps == ((0, 9 + DEPTH),)
    loaded = [part for part in report["segments"] if part["loaded"]]
    assert {part["source"] for part in loaded} == {"x"}
    assert [part["kind"] for part in loaded] == ["placeholder", "fixed"] * 3 + ["placeholder"]
    assert sum(part["loaded"] for part in report["segments"]) == report["loaded"] == 4 * 40 + 3 * 5 - DEPTH


def test_where_the_source_changes_the_run_ends() -> None:
    engine = Engine(make_half())
    engine.run(prompt("x", SYSTEM, QUESTION), [*FIRST, STOP])
    engine.run(prompt("y", OTHER, QUESTION, FIRST), [*SECOND, STOP])
    meta, report = engine.run(prompt("z", THIRD, QUESTION, FIRST, SECOND), [5, STOP])
    end = 9 + 40 + 5 + 40
    assert spans(meta) == [(9 + DEPTH, end), (end + 5 + DEPTH, end + 5 + 40)]
    assert [part["source"] for part in report["segments"] if part["loaded"]] == ["x", "x", "x", "y"]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("other text between", (QUESTION, FIRST)),
        ("another order", (FIRST, QUESTION)),
        ("one left out", (QUESTION, MORE)),
        ("a strange one between", (QUESTION, [900 + i for i in range(40)], FIRST)),
    ],
)
def test_another_arrangement_is_no_run(change: str, parts: tuple[list[int], ...]) -> None:
    engine = Engine(make_half())
    engine.run(prompt("x", SYSTEM, QUESTION, FIRST, MORE), [5, STOP])
    glue = [11, 12, 13, 14, 15] if change == "other text between" else GLUE
    _, report = engine.run(prompt("y", OTHER, *parts, glue=glue), [5, STOP])
    assert [part["loaded"] for part in report["segments"] if part["kind"] == "fixed"][1:-1] == [0] * (len(parts) - 1)
    known = [part for part in report["segments"] if part["name"] and part["source"]]
    assert all(part["repaired"] == DEPTH for part in known)


def test_the_repair_of_a_run_reaches_over_a_short_first_content() -> None:
    engine = Engine(make_half(repair_depth=16))
    short = QUESTION[:8]
    engine.run(prompt("x", SYSTEM, short, FIRST), [5, STOP])
    meta, report = engine.run(prompt("y", OTHER, short, FIRST), [5, STOP])
    assert meta.loads[0].gaps == ((0, 9 + 16),)
    assert [part["repaired"] for part in report["segments"]] == [9, 8, 5, 3, 0]


def test_the_missing_last_token_of_an_answer_is_repaired_within_the_run() -> None:
    from vllm.v1.request import RequestStatus

    engine = Engine(make_half())
    request = prompt("x", SYSTEM, QUESTION)
    engine.half.on_new_request(request)
    engine.admit(request)
    engine.obey(engine.prefill(request))
    engine.finish(request, FIRST, status=RequestStatus.FINISHED_LENGTH_CAPPED)
    engine.obey(engine.step())
    engine.run(prompt("x", SYSTEM, QUESTION, FIRST, MORE), [5, STOP])
    meta, _ = engine.run(prompt("y", OTHER, QUESTION, FIRST, MORE), [5, STOP])
    hole = 9 + 40 + 5 + 39
    assert meta.loads[0].gaps == ((0, 9 + DEPTH), (hole, hole + 1))


def test_long_text_between_is_not_kept() -> None:
    engine = Engine(make_half())
    long = [20 + i for i in range(MAX_SEPARATOR + 1)]
    engine.run(prompt("x", SYSTEM, QUESTION, FIRST, glue=long), [5, STOP])
    assert not [entry for entry in engine.half.index.entries() if entry.key.content.startswith("separator:")]


def test_another_session_finds_no_run() -> None:
    engine = Engine(make_half())
    engine.run(prompt("x", SYSTEM, QUESTION, FIRST, session="a"), [5, STOP])
    meta, report = engine.run(prompt("y", OTHER, QUESTION, FIRST, session="b"), [5, STOP])
    assert not meta.loads and report["loaded"] == 0


def test_a_released_session_takes_its_separators_along() -> None:
    engine = Engine(make_half())
    engine.run(prompt("x", SYSTEM, QUESTION, FIRST, session="a"), [5, STOP])
    assert [entry for entry in engine.half.index.entries() if entry.key.content.startswith("separator:")]
    engine.half.release_session("default", "a")
    assert not [entry for entry in engine.half.index.entries() if entry.key.content.startswith("separator:")]


def test_runs_can_be_switched_off() -> None:
    engine = Engine(make_half(join_runs=False))
    engine.run(prompt("x", SYSTEM, QUESTION, FIRST), [5, STOP])
    _, report = engine.run(prompt("y", OTHER, QUESTION, FIRST), [5, STOP])
    assert [part["repaired"] for part in report["segments"]] == [9, DEPTH, 5, DEPTH, 0]


def test_a_row_tells_positions_and_contents_apart() -> None:
    row = Row([1, 2, 3, 4], [0, 2, 4])
    assert len({row.at(0), row.at(2), row.at(4)}) == 3
    assert row.at(1) == ""
    assert Row([1, 2, 9, 9], [2]).at(2) == row.at(2)
    assert Row([1, 3], [2]).at(2) != row.at(2)
