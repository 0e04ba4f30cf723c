"""An agent's next turn takes over what its last one had, estimates included, and nobody else does."""

from __future__ import annotations

import asyncio

import pytest

from kvcomm_integrations.wire import Mode
from tests.engine.helpers import END, QUESTIONS, Answer, Client, Part, system

pytestmark = [pytest.mark.engine, pytest.mark.served(at_length=True)]
ANSWER = "<|im_end|>\n<|im_start|>user\n"


class Talk:
    """A worker that is asked again and again, behind a planner that has seen the question."""

    def __init__(self, client: Client, session: str) -> None:
        self.client, self.session = client, session
        self.question = client.encode(f"{session}: " + " ".join(QUESTIONS) * 3)  # nobody has computed it exactly
        planner = client.prompt(system("planner"), ("user_question", self.question), END)
        client.ask(planner, agent="planner", session=session, tokens=4)
        self.parts: list[Part] = [system("solver"), ("user_question", self.question), END]

    def turn(self, agent: str = "solver", **options: object) -> Answer:
        return self.client.ask(
            self.client.prompt(*self.parts),
            agent=agent,
            session=self.session,
            tokens=24,
            **options,  # type: ignore[arg-type]
        )

    def go_on(self, answer: Answer, number: int) -> None:
        result = self.client.encode(f"Result {number} of the tool: " + QUESTIONS[number % 3])
        self.parts += [("agent:solver:response", answer.content), ANSWER, ("result", result), END]


def test_the_cost_of_a_turn_does_not_grow(client: Client, session: str) -> None:
    talk = Talk(client, session)
    reports = []
    for number in range(5):
        answer = talk.turn()
        reports.append(answer.report)
        talk.go_on(answer, number)
    first, *later = reports
    assert first.carried == 0
    assert first.loaded > 300
    for before, report in zip(reports, later, strict=False):
        assert report.carried >= before.prompt_tokens - 128
        assert report.loaded + report.repaired + report.computed < 300
        assert 0 < report.carried_estimate <= report.carried
        assert report.repaired < first.repaired
    assert later[-1].exact + later[-1].carried > later[0].exact + later[0].carried


def test_others_find_nothing_of_it(client: Client, session: str) -> None:
    talk = Talk(client, session)
    talk.go_on(talk.turn(), 0)
    dense = talk.turn(mode=Mode.DENSE)
    assert dense.report.carried == 0
    plain = talk.client.ask(
        client.prompt(*talk.parts), agent="solver", session="elsewhere", mode=Mode.DENSE, salt=session, tokens=24
    )
    assert plain.report.exact == 0
    assert dense.ids == plain.ids
    assert talk.turn(mode=Mode.OBSERVE).ids == plain.ids
    assert talk.turn(agent="critic").report.carried == 0
    talk.session = session + "another"
    assert talk.turn().report.carried == 0


def test_forks_and_edits(client: Client, session: str) -> None:
    talk = Talk(client, session)
    talk.go_on(talk.turn(), 0)
    kept = list(talk.parts)
    talk.go_on(talk.turn(), 1)
    talk.turn()
    talk.parts = kept  # back in time: what came before is still there
    talk.go_on(talk.turn(), 2)
    assert talk.turn().report.carried > 300
    talk.parts = [system("writer"), *talk.parts[1:]]  # another beginning: no past at all
    assert talk.turn().report.carried == 0


async def test_two_calls_of_one_agent_at_once_end_well(client: Client, session: str) -> None:
    talk = Talk(client, session)
    talk.go_on(talk.turn(), 0)
    request = lambda: client.request(client.prompt(*talk.parts), agent="solver", session=session, tokens=12)  # noqa: E731
    answers = await asyncio.gather(*(client.arun(request()) for _ in range(3)))
    assert all(answer.report.carried > 300 for answer in answers)
    assert len({answer.ids for answer in answers}) == 1
