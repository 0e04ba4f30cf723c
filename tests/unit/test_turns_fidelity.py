"""Two answers to the same messages are compared as long as the words before are the same."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvcomm_integrations.bench.turns_fidelity import POSITIONS, compare_answers, summary


def told(token: str, **chances: float) -> dict[str, Any]:
    return {
        "token": token,
        "top_logprobs": [{"token": name, "logprob": math.log(chance)} for name, chance in chances.items()],
    }


def test_equal_answers_differ_nowhere() -> None:
    answer = [told("a", a=0.6, b=0.4)] * (POSITIONS + 5)
    kl, same = compare_answers(answer, answer)
    assert kl == [0.0] * POSITIONS and same == [True] * POSITIONS


def test_the_first_word_that_differs_is_the_last_compared() -> None:
    dense = [told("a", a=0.5, b=0.5), told("a", a=0.9, b=0.1), told("c", c=1.0)]
    reuse = [told("a", a=0.5, b=0.5), told("b", a=0.4, b=0.6), told("d", d=1.0)]
    kl, same = compare_answers(dense, reuse)
    assert same == [True, False]
    assert kl == pytest.approx([0.0, 0.9 * math.log(0.9 / 0.4) + 0.1 * math.log(0.1 / 0.6)])


def test_what_one_answer_does_not_tell_counts_as_its_least_likely() -> None:
    kl, _ = compare_answers([told("a", a=0.5, z=0.5)], [told("a", a=0.75, b=0.25)])
    assert kl == pytest.approx([0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)])


def test_means_are_over_conversations_and_positions() -> None:
    seen = [
        {"kl": [0.1, 0.3], "same": [True, False], "carried": 10, "loaded": 0},
        {"kl": [0.3], "same": [True], "carried": 20, "loaded": 5},
    ]
    line = summary(seen)
    assert line == pytest.approx(
        {"kl_first": 0.2, "kl_mean": 0.7 / 3, "agreement": 2 / 3, "carried": 15.0, "loaded": 2.5}
    )
