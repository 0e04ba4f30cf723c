"""What the requests of one agent in one session have in common, and nobody else."""

from __future__ import annotations

from dataclasses import replace

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.planning.lineages import MOST_BLOCKS, MOST_LINEAGES, Lineage, Lineages
from kvcomm_integrations.planning.plan import Plan, Span
from kvcomm_integrations.planning.resolved_prompt import ResolvedPrompt, resolve
from kvcomm_integrations.wire import KVCommParams

BLOCK = 16


class Request:
    """What planning needs to know of a request."""

    request_id = "r"
    prompt_token_ids = tuple(range(100))
    num_prompt_tokens = 100
    cache_salt = None


def prompt(**params: str) -> ResolvedPrompt:
    given = {"tenant": "t", "session": "s", "agent": "a", "policy": "ridge", **params}
    return resolve(Request(), KVCommParams(**given), ReuseConfig())  # type: ignore[arg-type]


FIRST = prompt()


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def test_a_lineage_is_one_tenant_session_agent_and_policy() -> None:
    lineages = Lineages()
    mine = lineages.of(prompt())
    assert lineages.of(prompt()) is mine
    others = [prompt(tenant="u"), prompt(session="u"), prompt(agent="u"), prompt(policy="aligned")]
    found = [lineages.of(other) for other in others]
    assert len({id(lineage) for lineage in [mine, *found]}) == 5
    [value] = hashes(7)
    assert len({lineage.hide(value) for lineage in [mine, *found]}) == 5


def test_names_do_not_run_together() -> None:
    lineages = Lineages()
    assert lineages.of(prompt(session="ab", agent="c")) is not lineages.of(prompt(session="a", agent="bc"))


def test_what_is_forgotten_gets_another_secret() -> None:
    lineages = Lineages()
    before = lineages.of(prompt())
    secret = before.secret
    for forget in (
        lambda: lineages.forget(prompt()),
        lambda: lineages.forget_session("t", "s"),
        lineages.clear,
    ):
        assert not lineages.of(prompt()).forgotten
        forget()
        again = lineages.of(prompt()).secret
        assert again != secret
        secret = again
    assert before.forgotten
    lineages.forget_session("t", "another")
    lineages.forget_session("u", "s")
    assert lineages.of(prompt()).secret == secret


def test_estimates_are_counted_by_block() -> None:
    lineages = Lineages()
    plan = Plan(0, 60, (Span(0, 8, 0, exact=True), Span(10, 40, 1), Span(44, 60, 2)))
    filed = hashes(1, 2, 3)  # the fourth block is not full yet
    lineages.note_estimates(plan, filed, BLOCK)
    assert [lineages.estimates([value]) for value in filed] == [6, 16, 12]
    assert lineages.estimates(filed) == 34
    assert lineages.estimates(hashes(9)) == 0
    lineages.note_estimates(plan, filed, BLOCK)  # another request with the same plan, at the same time
    assert lineages.estimates(filed) == 34
    lineages.note_estimates(Plan(16, 30, (Span(16, 20, 1),)), filed, BLOCK)  # from there on written anew
    assert [lineages.estimates([value]) for value in filed] == [6, 4, 0]
    lineages.clear()
    assert lineages.estimates(filed) == 0


def test_memory_is_bounded() -> None:
    lineages = Lineages()
    first = lineages.of(prompt(session="first"))
    for number in range(MOST_LINEAGES):
        lineages.of(replace(FIRST, params=FIRST.params.model_copy(update={"session": f"s{number}"})))
    assert len(lineages._known) == MOST_LINEAGES
    assert lineages.of(prompt(session="first")) is not first
    many = hashes(*range(MOST_BLOCKS + 10))
    lineages.note_estimates(Plan(0, len(many), (Span(0, len(many), 0),)), many, 1)
    assert lineages.estimates(many) == MOST_BLOCKS


def test_hidden_hashes_look_like_any_other() -> None:
    lineage, [value] = Lineage(), hashes(7)
    assert lineage.hide(value) == lineage.hide(value) != value
    assert len(lineage.hide(value)) == 32
