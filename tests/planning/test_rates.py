"""A plan is taken only if it is expected to be quicker than computing, by what the engine has measured."""

from __future__ import annotations

from kvcomm_integrations.planning.plan import Plan, Span
from kvcomm_integrations.planning.rates import LEAST, Rates

LONG = Plan(0, 1000, (Span(32, 1000, 0),))
SHORT = Plan(0, 40, (Span(32, 40, 0),))


def measured(token_ms: float = 1.0, step_ms: float = 20.0, load_ms: float = 0.01, extra_ms: float = 15.0) -> Rates:
    """Rates of an engine where a token, any forward, a loaded token and a repair pass cost so much."""
    rates = Rates()
    for _ in range(LEAST):
        rates.note_forward(1, step_ms)
        rates.note_forward(200, step_ms + 200 * token_ms)
        rates.note_plan(LONG, LONG.loaded * load_ms, LONG.repaired * token_ms + extra_ms)
    return rates


def test_nothing_is_said_before_enough_is_known() -> None:
    rates = Rates()
    assert rates.price(LONG) is None
    for _ in range(LEAST):
        rates.note_forward(200, 220.0)
    assert rates.price(LONG) is None


def test_a_token_costs_what_a_forward_takes_beyond_its_least() -> None:
    price = measured().price(LONG)
    assert price is not None
    assert round(price.dense) == 1000
    assert round(price.planned) == round(968 * 0.01 + 15 + 32)


def test_a_few_tokens_are_not_worth_a_repair_pass() -> None:
    price = measured().price(SHORT)
    assert price is not None
    assert price.planned > price.dense


def test_a_busy_moment_does_not_decide() -> None:
    rates = measured()
    rates.note_forward(200, 60_000.0)
    rates.note_plan(LONG, 5_000.0, 9_000.0)
    price = rates.price(LONG)
    assert price is not None
    assert price.planned < price.dense < 1100


def test_what_was_declined_is_tried_again_some_day() -> None:
    rates = measured(load_ms=3.0)
    declined = 0
    while (price := rates.price(LONG)) is not None and price.planned > price.dense:
        rates.declined()
        declined += 1
        assert declined < 1000
    assert declined > 1


def test_plans_that_only_copy_cost_no_repair_pass() -> None:
    copied = Plan(0, 100, (Span(0, 100, 0, exact=True),))
    price = measured().price(copied)
    assert price is not None
    assert price.planned < 2
    assert price.dense == 100
