"""The gate's decisions, one by one."""

from __future__ import annotations

import pytest

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.reuse.gate import EdgeHealth, EdgeState, decide
from kvcomm_integrations.reuse.policies.base import Readiness

CONFIG = ReuseConfig(repair_depth=32, mature_depth=8, mature_examples=8, max_divergence=0.5)


def _depth(examples: int, tokens: int, leverage: float | None = None) -> int:
    return decide(Readiness(examples, examples > 0, leverage), CONFIG, tokens=tokens).repair_depth


def test_a_fresh_edge_loads_with_deep_repair_of_at_most_half() -> None:
    assert _depth(0, 400) == 32
    assert _depth(0, 20) == 10


def test_repair_shrinks_with_examples_to_an_eighth_but_at_least_the_mature_depth() -> None:
    depths = [_depth(n, 100) for n in range(12)]
    assert depths == sorted(depths, reverse=True)
    assert depths[8:] == [12] * 4
    assert _depth(8, 40) == 8
    assert _depth(8, 4000) == 32


def test_new_contents_are_treated_as_on_a_fresh_edge() -> None:
    assert _depth(8, 64, leverage=0.5) == 8
    assert _depth(8, 64, leverage=1.2) == 32
    assert 8 < _depth(8, 64, leverage=0.9) < 32


def test_strict_waits_for_examples() -> None:
    strict = CONFIG.model_copy(update={"strict": True, "min_examples": 3})
    assert not decide(Readiness(2, True), strict, tokens=64).load
    assert decide(Readiness(3, True), strict, tokens=64).load


def test_bad_audits_deepen_then_close_and_fresh_examples_reopen() -> None:
    health = EdgeHealth()

    def now(examples: int) -> EdgeState:
        decide(Readiness(examples, True), CONFIG, tokens=64, health=health)
        return health.state

    health.audited(3.0)
    assert now(8) is EdgeState.OPEN  # one audit proves nothing
    for _ in range(3):
        health.audited(3.0)
    assert now(8) is EdgeState.DEEPER
    for _ in range(4):
        health.audited(3.0)
    assert now(8) is EdgeState.CLOSED
    assert not decide(Readiness(9, True), CONFIG, tokens=64, health=health).load
    assert now(16) is EdgeState.DEEPER
    for _ in range(4):
        health.audited(0.01)
    assert now(16) is EdgeState.OPEN


@pytest.mark.parametrize("tokens", [0, 1, 2, 3])
def test_very_short_contents_never_repair_more_than_they_have(tokens: int) -> None:
    assert 0 <= _depth(0, tokens) <= tokens
