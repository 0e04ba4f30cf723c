"""Requests without our parameters: what is found in their tokens, and what is never shared."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcomm_integrations.planning.discovery import LONGEST
from kvcomm_integrations.planning.ngram_index import NgramIndex
from tests.connector.standins import Engine, make_half, make_request, segment

LEAST = 20


def text(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=tokens)


SHARED = text(1, 60)


def engine(**options: Any) -> Engine:
    return Engine(make_half(discover_min_tokens=LEAST, **options))


def ask(engine: Engine, prompt: list[int], answer: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    """Run a request and the step after it, in which its answer is harvested; its report."""
    _, report = engine.run(make_request(prompt, **fields), answer or text(99, 12))
    return report


def test_a_run_that_an_earlier_request_had_is_loaded() -> None:
    plain = engine()
    first = ask(plain, text(2, 40) + SHARED + text(3, 9))
    second = ask(plain, text(4, 25) + SHARED + text(5, 7))
    assert first["loaded"] == 0
    [found] = [s for s in second["segments"] if s["loaded"]]
    assert (found["start"], found["end"]) == (25, 85)
    assert second["prompt_tokens"] == sum(second[k] for k in ("exact", "loaded", "repaired", "computed"))


def test_an_answer_is_found_in_the_next_prompt() -> None:
    plain = engine()
    answer = text(7, 50)
    ask(plain, text(2, 40), answer)
    report = ask(plain, text(3, 30) + answer[:-1] + text(4, 8))
    assert report["loaded"] > 30


def test_short_runs_do_not_count() -> None:
    plain = engine()
    ask(plain, text(2, 40) + SHARED[: LEAST - 1] + text(3, 9))
    report = ask(plain, text(4, 25) + SHARED[: LEAST - 1] + text(5, 7))
    assert report["loaded"] == 0


def test_other_salts_share_nothing() -> None:
    plain = engine()
    ask(plain, text(2, 40) + SHARED, salt="alice")
    other = ask(plain, text(4, 25) + SHARED + text(5, 7), salt="bob")
    same = ask(plain, text(6, 25) + SHARED + text(5, 7), salt="alice")
    assert other["loaded"] == 0
    assert same["loaded"] > 0


def test_requests_with_parameters_are_not_mixed_in() -> None:
    plain = engine()
    named = {"segments": [segment("placeholder", 40, 100, "user_question")], "session": "s"}
    ask(plain, text(2, 40) + SHARED + text(3, 9), params=named)
    report = ask(plain, text(4, 25) + SHARED + text(5, 7))
    assert report["loaded"] == 0


def test_without_the_setting_nothing_is_looked_at() -> None:
    plain = Engine(make_half())
    request = make_request(text(2, 40) + SHARED)
    plain.half.on_new_request(request)
    assert plain.admit(request) == 0
    plain.prefill(request)
    assert plain.finish(request, [1, 2]) == (False, None)
    assert len(plain.half.index) == 0


def test_a_request_that_arrives_with_another_waits_for_it() -> None:
    """Both arrive before either is admitted: what the first computes is seen when the second is matched."""
    plain = engine()
    one, two = make_request(text(2, 40) + SHARED + text(3, 9)), make_request(text(4, 25) + SHARED + text(5, 7))
    plain.half.on_new_request(one)
    plain.half.on_new_request(two)
    assert plain.admit(one) == 0
    assert plain.half.get_num_new_matched_tokens(two, 0) is None
    plain.obey(plain.prefill(one))
    plain.obey(plain.step())
    external = plain.admit(two)
    assert external is not None
    assert external > 0


def test_long_prompts_are_kept_in_pieces() -> None:
    plain = engine()
    whole = text(8, 2 * LONGEST + 100)
    ask(plain, whole)
    report = ask(plain, text(9, 30) + whole[LONGEST - 50 : LONGEST + 50] + text(5, 7))
    assert report["loaded"] > 80


@pytest.mark.parametrize("start", [0, 3, 52])
def test_the_longest_run_from_a_position(start: int) -> None:
    index = NgramIndex()
    index.add(1, "s", SHARED)
    ids = text(10, 5) + SHARED[start:] + text(11, 5)
    length = index.longest("s", ids, 5)
    assert length == len(SHARED) - start
    assert index.longest("other", ids, 5) == 0
    assert index.longest("s", ids, 0) == 0
