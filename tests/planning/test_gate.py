"""The gate's decision, and what audits make of an edge."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm_integrations.config import Gate, ReuseConfig
from kvcomm_integrations.planning.gate import FRESH_EXAMPLES, PROOF, EdgeHealth, Health, decide
from kvcomm_integrations.reuse.edge import Readiness

CONFIG = ReuseConfig(repair_depth=32, mature_depth=8, mature_examples=8, max_divergence=0.5)


def depth(examples: int, tokens: int = 64, leverage: float | None = None, config: ReuseConfig = CONFIG) -> int:
    decision = decide(Readiness(examples, examples > 0, leverage), config, tokens=tokens)
    assert decision.load
    return decision.repair_depth


def test_depth_shrinks_with_examples():
    assert [depth(n) for n in (0, 2, 4, 6, 8, 100)] == [32, 26, 20, 14, 8, 8]


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 0), (9, 4), (40, 20), (63, 31), (64, 32), (5000, 32)])
def test_a_fresh_edge_repairs_at_most_half_of_a_short_content(tokens, expected):
    assert depth(0, tokens) == expected


def test_a_mature_edge_repairs_the_first_eighth_but_never_more_than_a_fresh_one():
    assert [depth(99, tokens) for tokens in (10, 40, 64, 100, 200, 4000)] == [5, 8, 8, 12, 25, 32]


@pytest.mark.parametrize(("leverage", "expected"), [(None, 8), (0.0, 8), (0.8, 8), (0.9, 20), (1.0, 32), (50.0, 32)])
def test_leverage_above_one_is_a_fresh_edge(leverage, expected):
    assert depth(8, leverage=leverage) == expected


def test_strict_waits_for_examples_and_refuses_new_contents():
    strict = ReuseConfig(strict=True, min_examples=3)
    assert not decide(Readiness(2, True), strict, tokens=100).load
    assert decide(Readiness(3, True, 0.5), strict, tokens=100).load
    refused = decide(Readiness(9, True, 1.2), strict, tokens=100)
    assert not refused.load and "new" in refused.reason


@given(
    examples=st.integers(0, 50),
    tokens=st.integers(0, 3000),
    leverage=st.none() | st.floats(0, 10),
    repair_depth=st.integers(0, 300),
    mature_depth=st.integers(0, 300),
)
def test_depth_is_within_bounds_and_monotone(examples, tokens, leverage, repair_depth, mature_depth):
    config = ReuseConfig(repair_depth=repair_depth, mature_depth=mature_depth)
    now = depth(examples, tokens, leverage, config)
    assert 0 <= now <= min(repair_depth, tokens // 2)
    assert depth(examples + 1, tokens, leverage, config) <= now
    if leverage is not None:
        assert depth(examples, tokens, leverage + 0.1, config) >= now


def test_one_bad_audit_decides_nothing_and_many_do():
    health = EdgeHealth()
    health.audited(2.0)
    assert health.judge(0.5, 10) is Health.OPEN
    for _ in range(3):
        health.audited(2.0)
    assert health.judge(0.5, 10) is Health.DEEPER
    decision = decide(Readiness(99, True), CONFIG, tokens=1000, health=health)
    assert decision.load and decision.repair_depth == 64
    for _ in range(4):
        health.audited(2.0)
    assert health.judge(0.5, 10) is Health.CLOSED
    assert not decide(Readiness(12, True), CONFIG, tokens=1000, health=health).load


def test_small_audits_prove_an_edge_until_audits_of_its_shallow_repair_say_otherwise():
    health = EdgeHealth()
    ready = Readiness(9, True, 0.5)
    config = ReuseConfig(small_divergence=0.05)
    for _ in range(PROOF):
        assert decide(ready, config, tokens=1000, health=health).repair_depth == 32
        health.audited(0.004)
    assert decide(ready, config, tokens=1000, health=health).repair_depth == config.mature_depth
    assert decide(Readiness(9, True, 1.5), config, tokens=1000, health=health).repair_depth == 32, "new content"
    assert decide(Readiness(1, True, 0.5), config, tokens=1000, health=health).repair_depth > config.mature_depth
    between = decide(Readiness(9, True, 0.9), config, tokens=1000, health=health).repair_depth
    assert config.mature_depth < between < 32, "rather new"
    assert health.verdict is Health.PROVEN and "audits" in health.reason
    for _ in range(PROOF):
        health.audited(0.3)
    assert decide(ready, config, tokens=1000, health=health).repair_depth == 32
    for _ in range(PROOF):
        health.audited(0.004)
    assert health.judge(0.5, 9, 0.05) is Health.OPEN, "what was wrong once needs fresh examples"
    assert health.judge(0.5, 9 + FRESH_EXAMPLES, 0.05) is Health.PROVEN


def test_each_further_proof_halves_the_repair_until_audits_say_otherwise():
    health, config, ready = EdgeHealth(), ReuseConfig(small_divergence=0.05), Readiness(9, True, 0.5)

    def depth_after(divergence, audits=PROOF):
        for _ in range(audits):
            health.audited(divergence)
        return decide(ready, config, tokens=1000, health=health).repair_depth

    assert [depth_after(0.01) for _ in range(4)] == [8, 4, 2, 2], "no further than a quarter"
    assert depth_after(0.4, 32) == 4, "one step back"
    assert [depth_after(0.01) for _ in range(9)] == [4] * 9, "what was too shallow once is not tried again"
    assert depth_after(0.4, 32) == 8
    assert depth_after(0.4, 32) == 32
    assert health.verdict is Health.OPEN


def test_proof_can_be_switched_off_and_never_goes_beyond_the_limit():
    for config in (ReuseConfig(), ReuseConfig(small_divergence=0.05, max_divergence=0.001)):
        health = EdgeHealth()
        for _ in range(20):
            health.audited(0.002)
            decide(Readiness(9, True), config, tokens=1000, health=health)
        assert health.verdict is not Health.PROVEN


def test_fresh_examples_reopen_an_edge_step_by_step():
    health = EdgeHealth(verdict=Health.CLOSED)
    assert health.judge(0.5, 10) is Health.CLOSED
    assert health.judge(0.5, 10 + FRESH_EXAMPLES - 1) is Health.CLOSED
    assert health.judge(0.5, 10 + FRESH_EXAMPLES) is Health.DEEPER
    assert health.judge(0.5, 10 + 2 * FRESH_EXAMPLES) is Health.DEEPER, "no audit has agreed yet"
    for _ in range(4):
        health.audited(0.1)
    assert health.judge(0.5, 10 + 2 * FRESH_EXAMPLES) is Health.OPEN


def test_a_forgotten_edge_starts_counting_again():
    health = EdgeHealth(verdict=Health.CLOSED)
    health.judge(0.5, 100)
    assert health.judge(0.5, 0) is Health.CLOSED
    assert health.judge(0.5, FRESH_EXAMPLES) is Health.DEEPER


def test_a_broken_audit_counts_as_without_bound():
    health = EdgeHealth()
    health.audited(math.nan)
    assert health.judge(0.5, 3) is Health.DEEPER


@given(st.lists(st.floats(0, 0.3), min_size=1, max_size=100))
def test_good_audits_never_harm(divergences):
    health = EdgeHealth()
    for divergence in divergences:
        health.audited(divergence)
        assert health.judge(0.5, 5) is Health.OPEN


@given(st.lists(st.floats(0, 5), max_size=60))
def test_bounds_contain_the_mean_of_what_is_kept(divergences):
    health = EdgeHealth()
    for divergence in divergences:
        health.audited(divergence)
    low, high = health.bounds()
    kept = list(health.audits)
    assert low <= (sum(kept) / len(kept) if kept else 0) <= high


ENTROPY = ReuseConfig(gate=Gate.ENTROPY)


@pytest.mark.parametrize(
    ("entropy", "load"), [(0.0, True), (1.0, True), (1.001, False), (math.inf, False), (None, False)]
)
def test_the_entropy_gate_loads_what_is_predictable_and_asks_for_a_dense_run_otherwise(entropy, load):
    decision = decide(Readiness(3, True, entropy), ENTROPY, tokens=50, gates=True)
    assert (decision.load, decision.unpredictable) == (load, not load)
    assert "3 anchors" in decision.reason


def test_the_entropy_gate_is_for_policies_that_have_one_and_obeys_audits():
    assert decide(Readiness(3, True, 5.0), ENTROPY, tokens=50).load
    assert decide(Readiness(3, True, 5.0), ReuseConfig(), tokens=50, gates=True).load
    closed = EdgeHealth(Health.CLOSED)
    decision = decide(Readiness(3, True, 0.1), ENTROPY, tokens=50, health=closed, gates=True)
    assert not decision.load and not decision.unpredictable


def test_verdicts_give_their_reason():
    health = EdgeHealth()
    assert (health.last, health.reason) == (None, "")
    for kl in (2.0, 2.0, 2.0):
        health.audited(kl)
    assert health.judge(0.5, 3) is Health.DEEPER
    assert health.last == 2.0 and "limit 0.5" in health.reason
