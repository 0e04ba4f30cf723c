"""What is promised about one reused request: what is loaded, what is exact, and that nothing approximate leaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcomm_integrations.wire import TREATMENTS, Mode
from tests.engine.helpers import END, QUESTIONS, Client, system

pytestmark = [pytest.mark.engine, pytest.mark.served]


def test_second_agent_loads_what_the_first_has_seen(client: Client, session: str) -> None:
    question = client.encode(QUESTIONS[0] + " " + QUESTIONS[1])
    first = client.ask(client.prompt(system("planner"), ("user_question", question), END), agent="p", session=session)
    assert first.report.loaded == 0
    prompt = client.prompt(
        system("solver"), ("user_question", question), "\nPlan:\n", ("agent:p:response", first.content), END
    )
    second = client.ask(prompt, agent="s", session=session)
    by_name = {s.name: s for s in second.report.segments}
    assert by_name["user_question"].loaded >= len(question) // 2
    assert by_name["user_question"].source == "p"


def test_a_request_that_ends_with_its_first_token_says_what_was_loaded(client: Client, session: str) -> None:
    question = client.encode(QUESTIONS[2] + QUESTIONS[0])
    for agent in ("planner", "solver"):
        answer = client.ask(
            client.prompt(system(agent), ("user_question", question), END), agent=agent, session=session, tokens=1
        )
    assert len(answer.ids) == 1
    assert answer.report.loaded > len(question) // 2
    assert answer.report.load_ms > 0


def test_reported_tokens_add_up_and_were_materialised(client: Client, session: str) -> None:
    question = client.encode(QUESTIONS[1] + " " + QUESTIONS[2])
    client.ask(client.prompt(system("planner"), ("user_question", question), END), agent="p", session=session)
    before = client.engine.call_workers("kvcomm_stats")[0]["loaded_tokens"]
    answer = client.ask(client.prompt(system("critic"), ("user_question", question), END), agent="c", session=session)
    report = answer.report
    assert sum(getattr(report, treatment) for treatment in TREATMENTS) == report.prompt_tokens
    for field in TREATMENTS:
        assert sum(getattr(s, field) for s in report.segments) == getattr(report, field)
    after = client.engine.call_workers("kvcomm_stats")[0]["loaded_tokens"]
    assert after - before == report.loaded > 0
    assert answer.last.cached_tokens == report.exact + report.loaded + report.repaired


def test_dense_mode_equals_the_engine_without_reuse(client: Client, session: str) -> None:
    """Invariant 1, token for token: a request that plans no reuse, before and after reuse has happened."""
    question = client.encode(QUESTIONS[2])
    prompt = client.prompt(system("planner"), ("user_question", question), END)
    plain = client.ask(prompt, agent="x", session=session, mode=Mode.DENSE, salt=session + "1")
    client.ask(prompt, agent="p", session=session)
    client.ask(client.prompt(system("critic"), ("user_question", question), END), agent="c", session=session)
    again = client.ask(prompt, agent="x", session=session, mode=Mode.DENSE, salt=session + "2")
    assert plain.ids == again.ids
    assert plain.report.loaded == again.report.loaded == 0


def test_approximate_kv_never_enters_the_exact_prefix_cache(client: Client, session: str) -> None:
    """Invariant 2: approximate, then plain for the same tokens, then plain for a prompt that extends the answer."""
    question = client.encode(" ".join(QUESTIONS))
    prompt = client.prompt(system("solver"), ("user_question", question), END)
    dense = client.ask(prompt, agent="d", session=session, mode=Mode.DENSE, salt=session, tokens=40)
    client.ask(client.prompt(system("planner"), ("user_question", question), END), agent="p", session=session)
    approximate = client.ask(prompt, agent="s", session=session, tokens=40)
    assert approximate.report.loaded > 128
    plain = client.ask(prompt, agent="d", session=session, mode=Mode.DENSE, tokens=40)
    assert plain.ids == dense.ids
    assert plain.report.exact % 128 == 0
    extended = client.prompt(
        system("solver"),
        ("user_question", question),
        END,
        ("agent:s:response", approximate.content),
        "\nAnd why?" + END,
    )
    longer = client.ask(extended, agent="d", session=session, mode=Mode.DENSE, tokens=24)
    truth = client.ask(extended, agent="d", session=session, mode=Mode.DENSE, tokens=24, salt=session + "truth")
    assert longer.ids == truth.ids


def test_loading_into_the_context_it_came_from_is_exact(client: Client, session: str) -> None:
    """Invariant 4: same prompt, other cache salt for the exact cache, so that everything is loaded back."""
    question = client.encode(QUESTIONS[0] + " " + QUESTIONS[1])
    prompt = client.prompt(system("writer"), ("user_question", question), END)
    dense = client.ask(prompt, agent="w", session=session, tokens=24)
    loaded = client.ask(prompt, agent="w", session=session, tokens=24)
    assert loaded.report.loaded > 0
    assert loaded.ids == dense.ids


def test_sessions_do_not_share(client: Client, session: str) -> None:
    question = client.encode(QUESTIONS[0] + " " + QUESTIONS[2])
    first = client.prompt(system("planner"), ("user_question", question), END)
    second = client.prompt(system("solver"), ("user_question", question), END)
    client.ask(first, agent="p", session=session + "a")
    other = client.ask(second, agent="s", session=session + "b")
    same = client.ask(second, agent="s", session=session + "a", salt=None)
    assert other.report.loaded == 0
    assert same.report.loaded > 0


def test_a_part_of_a_response_is_loaded_from_the_whole(client: Client, session: str) -> None:
    """Frameworks strip thinking and whitespace; what is left is still found in what was generated."""
    question = client.encode(QUESTIONS[0])
    whole = client.ask(
        client.prompt(system("planner"), ("user_question", question), END), agent="p", session=session, tokens=140
    )
    part = whole.content[10:130]
    prompt = client.prompt(system("writer"), "Text: ", ("agent:p:response", part), END)
    report = client.ask(prompt, agent="w", session=session).report
    segment = next(s for s in report.segments if s.name == "agent:p:response")
    assert segment.loaded >= len(part) // 2
    assert segment.source == "p"


def test_harvest_and_load_agree_to_rounding(client: Client, session: str) -> None:
    """Invariant 4 in numbers: an audit of the very context a reference came from finds no divergence."""
    question = client.encode(" ".join(reversed(QUESTIONS)))
    prompt = client.prompt(system("critic"), ("user_question", question), END)
    client.ask(prompt, agent="c", session=session)
    client.engine.call_workers("kvcomm_take_audits")
    request = client.request(prompt, agent="c", session=session, mode=Mode.OBSERVE)
    audited = request.params.model_copy(update={"audit": ("aligned",)})
    client.run(replace(request, params=audited))
    client.ask(prompt, agent="c", session=session, tokens=1)  # a step in which the audit is done
    [audit] = client.engine.call_workers("kvcomm_take_audits")[0]
    assert audit["loaded"] > 0
    assert max(audit["kl"]) < 1e-6
    assert all(audit["agreement"])


def test_the_beginning_of_an_agents_prompt_is_copied_exactly(client: Client, session: str) -> None:
    """Too short for vLLM's prefix cache; shared by sessions as that cache is, not by tenants."""
    beginning = (
        f"<|im_start|>system\nYou are the tester of {session[-60:]}. Say what you see.<|im_end|>\n<|im_start|>user\n"
    )
    first = client.prompt(beginning, ("user_question", client.encode(QUESTIONS[0])), END)
    second = client.prompt(beginning, ("user_question", client.encode(QUESTIONS[1])), END)
    tenant = {"agent": "t", "tenant": session[-60:]}
    client.ask(first, session="one", **tenant)
    copied = client.ask(second, session="two", **tenant)
    assert copied.report.exact == len(client.encode(beginning))
    assert copied.report.loaded == 0
    dense = client.ask(second, session="two", mode=Mode.DENSE, salt=session, **tenant)
    assert copied.ids == dense.ids
    other = client.ask(second, agent="t", session="three", tenant="somebody else")
    assert other.report.exact == 0
