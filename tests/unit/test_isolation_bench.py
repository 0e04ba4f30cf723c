"""The attacker's arithmetic."""

from __future__ import annotations

import pytest

from kvcomm_integrations.bench.isolation import advantage


@pytest.mark.parametrize(
    ("right", "wrong", "expected"),
    [([1.0, 2.0], [3.0, 4.0], 1.0), ([3.0, 4.0], [1.0, 2.0], 0.0), ([1.0, 3.0], [2.0, 2.0], 0.5), ([1.0], [1.0], 0.5)],
)
def test_the_chance_that_a_right_guess_is_faster(right: list[float], wrong: list[float], expected: float) -> None:
    assert advantage(right, wrong) == expected
