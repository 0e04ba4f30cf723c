"""AutoGen teams on the real engine: what each agent's prompt is made of, turn by turn."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

pytest.importorskip("autogen_agentchat")

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import EVENT_LOGGER_NAME

from kvcomm_integrations.autogen import KVCommChatCompletionClient
from kvcomm_integrations.bench.problems import generate_documents
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.wire import TREATMENTS, RequestReport
from tests.engine.helpers import ROLES

pytestmark = [pytest.mark.engine, pytest.mark.served]

AGENTS = ("planner", "solver", "critic")
TURNS = 5
ANSWER_TOKENS = 112
"""Answers are cut here, and never end earlier: the first 32 tokens of each are repaired, so they have to be longer."""
LEAST_SHARE = 0.7


@pytest.fixture
def reports() -> Iterator[list[RequestReport]]:
    """The reports of all model calls, in order."""
    received: list[RequestReport] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            report = getattr(record.msg, "kwargs", {}).get("kvcomm")
            if report:
                received.append(RequestReport.model_validate(report))

    logger, handler = logging.getLogger(EVENT_LOGGER_NAME), Keep()
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    yield received
    logger.removeHandler(handler)
    logger.setLevel(level)
    logger.propagate = propagate


def _team(engine: InProcessEngine, turns: int = TURNS, *, stream: bool = False) -> RoundRobinGroupChat:
    client = KVCommChatCompletionClient(
        model=engine.config.model, engine=engine, temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True
    )
    agents = [
        AssistantAgent(name, model_client=client, system_message=ROLES[name], model_client_stream=stream)
        for name in AGENTS
    ]
    return RoundRobinGroupChat(agents, max_turns=turns)


async def test_five_turns_of_three_agents_are_mostly_reused(
    engine: InProcessEngine, reports: list[RequestReport]
) -> None:
    """Every agent but the first in round one, and every agent from its second turn on: 70 % not computed."""
    document = generate_documents(1, seed=5, min_tokens=500, max_tokens=600)[0]
    team = _team(engine)
    result = await team.run(task=f"{document}\n\nWhat does this text say, and what follows from it?")
    assert [message.source for message in result.messages] == ["user", *(AGENTS[i % 3] for i in range(TURNS))]
    assert [report.agent for report in reports] == [AGENTS[i % 3] for i in range(TURNS)]
    assert {report.session for report in reports} == {team._team_id}
    for turn, report in enumerate(reports):
        assert sum(getattr(report, treatment) for treatment in TREATMENTS) == report.prompt_tokens
        share = (report.exact + report.carried + report.loaded) / report.prompt_tokens
        assert turn == 0 or share >= LEAST_SHARE, f"turn {turn}: {report.model_dump(exclude={'segments'})}"


async def test_a_streamed_team_is_reused_too_and_others_are_not(
    engine: InProcessEngine, reports: list[RequestReport]
) -> None:
    """A second team on the same engine is another session: its first turn loads nothing."""
    document = generate_documents(1, seed=6, min_tokens=200, max_tokens=250)[0]
    for stream in (True, False):
        await _team(engine, 2, stream=stream).run(task=document)
    first, second, third, fourth = reports
    assert first.loaded == third.loaded == 0
    assert second.loaded > 0 < fourth.loaded
    assert first.session == second.session != third.session == fourth.session
