"""What waits to be computed again: one task for each agent of a session, bounded, the most valuable first."""

from __future__ import annotations

from typing import Any

import pytest

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.planning import shadow_queue
from kvcomm_integrations.planning.resolved_prompt import resolve
from kvcomm_integrations.planning.shadow_queue import MOST_TRIES, OLDEST_S, ShadowQueue, ShadowTask
from kvcomm_integrations.wire import KVCommParams


class Asked:
    """As much of a request as planning needs."""

    cache_salt = None

    def __init__(self, tokens: int) -> None:
        self.request_id, self.num_prompt_tokens = "r", tokens
        self.prompt_token_ids: list[int] | None = list(range(tokens))


def task(agent: str = "a", session: str = "s", *, tokens: int = 10, **more: Any) -> ShadowTask:
    prompt = resolve(Asked(tokens), KVCommParams(agent=agent, session=session, tenant="t"), ReuseConfig())
    fields: dict[str, Any] = {"answer": (1, 2), "served": None, "estimates": 1, "young": False, "salt": None, "born": 0}
    return ShadowTask(prompt=prompt, **{**fields, **more})


def queue(limit: int = 8, now: float = 1.0) -> ShadowQueue:
    return ShadowQueue(limit, clock=lambda: now)


def taken(of: ShadowQueue) -> list[tuple[str, str]]:
    found = []
    while (one := of.take()) is not None:
        found.append((one.prompt.agent, one.prompt.params.session))
    return found


def test_what_teaches_comes_first_then_what_holds_most_estimates_then_what_is_newest() -> None:
    waiting = queue()
    for name, estimates, young, born in [("few", 1, False, 9), ("old", 5, False, 1), ("new", 5, False, 2)]:
        waiting.add(task(name, estimates=estimates, young=young, born=born))
    waiting.add(task("young", young=True))
    assert [agent for agent, _ in taken(waiting)] == ["young", "new", "old", "few"]


@pytest.mark.parametrize("order", [(1.0, 2.0), (2.0, 1.0)])
def test_of_an_agents_turns_in_a_session_only_the_last_waits(order: tuple[float, float]) -> None:
    waiting = queue()
    for born in order:
        waiting.add(task(born=born, estimates=int(born)))
    waiting.add(task(session="other"))
    assert len(waiting) == 2 and waiting.given_up == 1
    one = waiting.take()
    assert one is not None and one.estimates == 2


def test_too_many_too_old_too_long_and_begun_too_often_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = queue(2)
    for number in range(4):
        waiting.add(task(f"a{number}", estimates=number))
    assert waiting.given_up == 2 and [agent for agent, _ in taken(waiting)] == ["a3", "a2"]
    late = queue(now=OLDEST_S + 1)
    late.add(task())
    late.add(task("b", born=2))
    late.add(task("c", born=2, tries=MOST_TRIES))
    assert taken(late) == [("b", "s")] and late.given_up == 2
    monkeypatch.setattr(shadow_queue, "MOST_TOKENS", 100)
    long = queue()
    long.add(task("a", tokens=60, estimates=2))
    long.add(task("b", tokens=60))
    assert taken(long) == [("a", "s")]


def test_a_released_session_waits_for_nothing() -> None:
    waiting = queue()
    for session in ("s", "r"):
        waiting.add(task(session=session))
    waiting.forget_session("u", "s")
    waiting.forget_session("t", "s")
    assert taken(waiting) == [("a", "r")]
    waiting.add(task())
    waiting.clear()
    assert waiting.take() is None


def test_each_time_it_is_begun_counts_and_its_last_token_is_left_out() -> None:
    waiting = queue()
    waiting.add(task(tokens=3))
    one = waiting.take()
    assert one is not None and one.tries == 1 and one.token_ids == [0, 1, 2, 1]
