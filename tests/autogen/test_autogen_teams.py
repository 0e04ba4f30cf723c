"""Every kind of team, unmodified: who asks, in which session, and which shared contents are found for whom."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from ag_helpers import agents, fake, loaded_from, placeholders, requests_of, sessions, until_asked, who
from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent
from autogen_agentchat.conditions import HandoffTermination, MaxMessageTermination, TextMentionTermination
from autogen_agentchat.messages import HandoffMessage, ModelClientStreamingChunkEvent, TextMessage
from autogen_agentchat.teams import (
    DiGraphBuilder,
    GraphFlow,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
    Swarm,
)
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_core import CancellationToken

from kvcomm_integrations.autogen import session_scope
from kvcomm_integrations.prompts.chat_message import SEPARATOR

TASK = "How does the river Seine reach the sea, and which towns does it pass on its way there? Answer in detail."
SAID = {
    "planner": "First list the towns along the river from Paris downwards, then describe the estuary near the sea.",
    "solver": "It passes Mantes, Vernon, Les Andelys and Rouen, and it meets the sea between Le Havre and Honfleur.",
    "critic": "The list of towns is right as far as it goes, but it leaves out Poissy, Elbeuf and Caudebec-en-Caux.",
    "writer": "From Paris the Seine winds past Poissy, Vernon and Rouen, and meets the sea at Le Havre and Honfleur.",
}
ROLES = {name: f"You are the {name} of a small team that answers questions about rivers." for name in SAID}

pytestmark = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def say(request):
    """Every agent says its own line."""
    return SAID[request.params.agent]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def agent(name: str, client: Any, stream: bool, **kwargs: Any) -> AssistantAgent:
    kwargs.setdefault("system_message", ROLES.get(name, f"You are {name}, and you do what you are asked to do."))
    return AssistantAgent(name, model_client=client, model_client_stream=stream, description=f"The {name}.", **kwargs)


def team_of(client: Any, stream: bool, *names: str) -> list[Any]:
    return [agent(name, client, stream) for name in names]


def texts(result: Any) -> list[str]:
    return [message.content for message in result.messages if isinstance(message, TextMessage)]


async def test_round_robin(make, reports, stream):
    client = make(say)
    team = RoundRobinGroupChat(
        team_of(client, stream, "planner", "solver", "critic"), termination_condition=MaxMessageTermination(6)
    )
    result = await team.run(task=TASK)
    assert texts(result) == [TASK, *(SAID[name] for name in ("planner", "solver", "critic", "planner", "solver"))]
    assert agents(client) == ["planner", "solver", "critic", "planner", "solver"]
    assert sessions(client) == {team._team_id}
    solver, critic = requests_of(client, "solver")[0], requests_of(client, "critic")[0]
    assert placeholders(client, solver) == {"user_question": TASK, "agent:planner:response": SAID["planner"]}
    assert placeholders(client, critic) == {
        "user_question": TASK,
        "agent:planner:response": SAID["planner"],
        "agent:solver:response": SAID["solver"],
    }
    again = placeholders(client, requests_of(client, "solver")[1])
    assert again["agent:critic:response"] == SAID["critic"]
    assert again["agent:solver:response"] == SAID["solver"]
    by_agent = reports()
    assert loaded_from(by_agent[0]) == {}
    assert loaded_from(by_agent[1])["user_question"] == "planner"
    assert loaded_from(by_agent[2]) == {
        "user_question": "planner",
        "agent:planner:response": "planner",
        "agent:solver:response": "solver",
    }


async def test_round_robin_streams_chunks(make, stream):
    client = make(say)
    team = RoundRobinGroupChat(
        team_of(client, stream, "planner", "solver"), termination_condition=MaxMessageTermination(3)
    )
    chunks = [m async for m in team.run_stream(task=TASK) if isinstance(m, ModelClientStreamingChunkEvent)]
    said = {name: "".join(c.content for c in chunks if c.source == name) for name in ("planner", "solver")}
    assert said == ({name: SAID[name] for name in said} if stream else {"planner": "", "solver": ""})
    assert agents(client) == ["planner", "solver"]


async def test_selector_with_a_model_selector(make, reports, stream):
    def script(request):
        if request.params.agent != "SelectorGroupChatManager":
            return say(request)
        return "critic" if "planner: First list" in request.prompt.text else "planner"

    client = make(script)
    team = SelectorGroupChat(
        team_of(client, stream, "planner", "critic", "writer"),
        model_client=client,
        termination_condition=MaxMessageTermination(3),
        model_client_streaming=stream,
    )
    result = await team.run(task=TASK)
    assert [m.source for m in result.messages] == ["user", "planner", "critic"]
    assert agents(client) == ["SelectorGroupChatManager", "planner", "SelectorGroupChatManager", "critic"]
    assert sessions(client) == {team._team_id}
    # The transcript is interpolated into the selector's prompt, and found there.
    second = placeholders(client, requests_of(client, "SelectorGroupChatManager")[1])
    assert second["agent:planner:response"] == SAID["planner"]
    assert TASK in second.values()
    assert loaded_from(reports()[3]).keys() >= {"agent:planner:response"}


async def test_swarm_hand_offs(make, stream):
    def script(request):
        if request.params.agent == "planner":
            return call("transfer_to_solver")
        return say(request)

    client = make(script)
    planner = agent("planner", client, stream, handoffs=["solver"])
    solver = agent("solver", client, stream, handoffs=["planner"])
    team = Swarm([planner, solver], termination_condition=MaxMessageTermination(3))
    result = await team.run(task=TASK)
    assert [type(m).__name__ for m in result.messages if m.source != "user"][-2:] == [
        "HandoffMessage",
        "TextMessage",
    ]
    assert agents(client) == ["planner", "solver"]
    assert sessions(client) == {team._team_id}
    found = placeholders(client, requests_of(client, "solver")[0])
    assert found["user_question"] == TASK
    handoff = next(m for m in result.messages if isinstance(m, HandoffMessage))
    assert handoff.content in requests_of(client, "solver")[0].prompt.text


async def test_swarm_hands_back_to_the_user(make, stream):
    client = make(lambda request: call("transfer_to_user"))
    planner = agent("planner", client, stream, handoffs=["user"])
    team = Swarm([planner], termination_condition=HandoffTermination("user"))
    await team.run(task=TASK)
    await team.run(task=HandoffMessage(source="user", target="planner", content="And where does it rise, in detail?"))
    assert who(client) == [("planner", team._team_id)] * 2


async def test_graph_flow_with_a_join(make, reports, stream):
    client = make(say)
    planner, solver, critic, writer = team_of(client, stream, "planner", "solver", "critic", "writer")
    builder = DiGraphBuilder()
    for node in (planner, solver, critic, writer):
        builder.add_node(node)
    builder.add_edge(planner, solver).add_edge(planner, critic).add_edge(solver, writer).add_edge(critic, writer)
    team = GraphFlow([planner, solver, critic, writer], graph=builder.build())
    await team.run(task=TASK)
    assert agents(client)[0] == "planner"
    assert sorted(agents(client)[1:3]) == ["critic", "solver"]
    assert agents(client)[3:] == ["writer"]
    assert sessions(client) == {team._team_id}
    joined = placeholders(client, requests_of(client, "writer")[0])
    assert joined == {"user_question": TASK} | {
        f"agent:{name}:response": SAID[name] for name in ("planner", "solver", "critic")
    }
    assert set(loaded_from(reports()[3])) == set(joined)


FACTS = "The request names the river Seine. The towns have to be looked up on a map, and the estuary recalled."
PLAN = "The planner lists the towns along the river first; after that the writer puts them into sentences."


def ledger(speaker: str, instruction: str, *, done: bool) -> str:
    def entry(answer: Any) -> dict[str, Any]:
        return {"reason": "because", "answer": answer}

    return json.dumps(
        {
            "is_request_satisfied": entry(done),
            "is_in_loop": entry(False),
            "is_progress_being_made": entry(True),
            "next_speaker": entry(speaker),
            "instruction_or_question": entry(instruction),
        }
    )


async def test_magentic_one(make, stream):
    instruction = "Please list every town on the river from Paris down to the sea, and do it in the right order."
    orchestrator = "MagenticOneOrchestrator"
    steps = iter([FACTS, PLAN, ledger("planner", instruction, done=False), ledger("planner", "", done=True), "Done."])

    def script(request):
        return next(steps) if request.params.agent == orchestrator else say(request)

    client = make(script)
    team = MagenticOneGroupChat(team_of(client, stream, "planner", "writer"), model_client=client)
    result = await team.run(task=TASK)
    assert result.messages[-1].content == "Done."
    assert agents(client) == [orchestrator] * 3 + ["planner"] + [orchestrator] * 2
    assert sessions(client) == {team._team_id}
    facts, plan, first, *_ = requests_of(client, orchestrator)
    assert "json" in first.sampling.structured_output and facts.sampling.structured_output is None
    assert FACTS in placeholders(client, plan).values()
    # Task, facts and plan stand inside one message, and are found there.
    ledger_parts = placeholders(client, first).values()
    assert {FACTS, PLAN} <= set(ledger_parts)
    worker = placeholders(client, requests_of(client, "planner")[0]).values()
    assert {FACTS, PLAN} <= set(worker)
    second = placeholders(client, requests_of(client, orchestrator)[3])
    assert second["agent:planner:response"] == SAID["planner"]


async def test_agent_tool_inside_a_team(make, reports, stream):
    """The inner agent runs in the outer agent's handler and reports its id; it is told apart all the same."""

    def script(request):
        if request.params.agent == "planner/writer":
            return SAID["writer"]
        if request.params.agent == "planner":
            return call("writer", task=TASK) if "writer: From Paris" not in request.prompt.text else SAID["planner"]
        return say(request)

    client = make(script, parallel_tool_calls=False)
    planner = agent("planner", client, stream, tools=[AgentTool(agent("writer", client, stream))],
                    max_tool_iterations=3)  # fmt: skip
    critic = agent("critic", client, stream)
    team = RoundRobinGroupChat([planner, critic], max_turns=2)
    result = await team.run(task=TASK)
    assert result.messages[-1].source == "critic"
    assert agents(client) == ["planner", "planner/writer", "planner", "critic"]
    assert sessions(client) == {team._team_id}
    inner, outer = requests_of(client, "planner/writer")[0], requests_of(client, "planner")[1]
    assert placeholders(client, inner)["user_question"] == TASK
    assert SAID["writer"] in placeholders(client, outer).values()  # within "writer: <text>"
    assert loaded_from(reports()[1])["user_question"] == "planner"


async def test_agent_tool_called_twice_keeps_its_name(make, stream):
    state = Counter()

    def script(request):
        name = request.params.agent
        state[name] += 1
        if name == "planner":
            return call("writer", task=TASK) if state[name] < 3 else SAID["planner"]
        return SAID["writer"]

    client = make(script)
    tool = AgentTool(agent("writer", client, stream))
    team = RoundRobinGroupChat([agent("planner", client, stream, tools=[tool], max_tool_iterations=5)], max_turns=1)
    await team.run(task=TASK)
    assert agents(client) == ["planner", "planner/writer", "planner", "planner/writer", "planner"]


async def test_nested_team_is_a_session_of_its_own_unless_scoped(make, stream):
    client = make(say)

    def nested():
        inner = RoundRobinGroupChat(
            team_of(client, stream, "solver", "critic"), name="inner", termination_condition=MaxMessageTermination(4)
        )
        outer = RoundRobinGroupChat(
            [agent("planner", client, stream), inner], termination_condition=MaxMessageTermination(4)
        )
        return inner, outer

    inner, outer = nested()
    await outer.run(task=TASK)
    by_agent = dict(who(client))
    assert by_agent["planner"] == outer._team_id
    assert by_agent["solver"] == by_agent["critic"] == inner._team_id
    fake(client).requests.clear()
    _, outer = nested()
    with session_scope("ticket-17"):
        await outer.run(task=TASK)
    assert who(client)[:3] == [("planner", "ticket-17"), ("solver", "ticket-17"), ("critic", "ticket-17")]
    assert placeholders(client, requests_of(client, "solver")[0])["agent:planner:response"] == SAID["planner"]


async def test_society_of_mind_and_team_tool(make, stream):
    def script(request):
        if request.params.agent in SAID:
            return SAID[request.params.agent]
        return "We think that the Seine meets the sea between Le Havre and Honfleur, after many bends."

    client = make(script)
    inner = RoundRobinGroupChat(
        team_of(client, stream, "solver", "critic"), termination_condition=MaxMessageTermination(3)
    )
    society = SocietyOfMindAgent("society", team=inner, model_client=client)
    with session_scope("one"):
        await RoundRobinGroupChat([society], termination_condition=MaxMessageTermination(2)).run(task=TASK)
    assert who(client) == [("solver", "one"), ("critic", "one"), ("society", "one")]
    final = placeholders(client, requests_of(client, "society")[0])
    assert final["agent:solver:response"] == SAID["solver"]

    tool = TeamTool(team=inner, name="experts", description="Ask experts.")
    await inner.reset()
    fake(client).requests.clear()
    outer = agent("planner", make(lambda _: call("experts", task=TASK)), stream, tools=[tool])
    with session_scope("two"):
        await outer.run(task=TASK)
    assert who(client) == [("solver", "two"), ("critic", "two")]


async def test_assistant_with_tools_and_reflection(make, reports, stream):
    weather = "It is sunny in Rouen today, with a light wind from the west and a few clouds over the river and hills."

    def get_weather(city: str) -> str:
        """The weather of a city."""
        return weather

    steps = iter([call("get_weather", city="Rouen"), "It is sunny in Rouen."])
    client = make(lambda _: next(steps))
    alone = agent("solver", client, stream, tools=[get_weather], reflect_on_tool_use=True)
    result = await alone.run(task=TASK)
    assert result.messages[-1].content == "It is sunny in Rouen."
    first, second = fake(client).requests
    assert "The weather of a city." in first.prompt.text
    assert "The weather of a city." not in second.prompt.text  # the call is repeated without tools
    assert second.params.agent == "solver"
    found = placeholders(client, second)
    assert found["user_question"] == TASK
    assert found["tool:get_weather:result"] == weather
    # The call is an answer of its own; the template text before it is loaded with it.
    assert loaded_from(reports()[1]).keys() - {""} == {"user_question", "agent:solver:response"}


async def test_reflection_inside_a_team_keeps_the_agent(make, stream):
    def lookup(town: str) -> str:
        """Looks a town up."""
        return f"{town} is a port on the river Seine, about eighty kilometres from its mouth, with a famous cathedral."

    def script(request):
        if request.params.agent != "solver":
            return say(request)
        return SAID["solver"] if "is a port on" in request.prompt.text else call("lookup", town="Rouen")

    client = make(script)
    solver = agent("solver", client, stream, tools=[lookup], reflect_on_tool_use=True)
    team = RoundRobinGroupChat([solver, agent("critic", client, stream)],
                               termination_condition=MaxMessageTermination(3))  # fmt: skip
    await team.run(task=TASK)
    assert agents(client) == ["solver", "solver", "critic"]
    assert placeholders(client, fake(client).requests[2]) == {
        "user_question": TASK,
        "agent:solver:response": SAID["solver"],
    }


async def test_concurrent_teams_share_a_client_but_no_session(make, reports, stream):
    client = make(say, engine={"token_latency": 0.001})

    def team():
        return RoundRobinGroupChat(
            team_of(client, stream, "planner", "solver", "critic"), termination_condition=MaxMessageTermination(4)
        )

    teams = [team() for _ in range(3)]
    await asyncio.gather(*(each.run(task=f"Question {i}: {TASK}") for i, each in enumerate(teams)))
    assert sessions(client) == {each._team_id for each in teams}
    for each in teams:
        mine = [agent for agent, session in who(client) if session == each._team_id]
        assert mine == ["planner", "solver", "critic"]
    for report in reports():
        names = [segment.name for segment in report.segments if segment.loaded]
        assert report.agent != "planner" or not names  # nobody loads what another team has read
    assert sum(bool(report.loaded) for report in reports()) == 6


async def test_a_team_that_goes_on_keeps_its_session(make, stream):
    client = make(say)
    team = RoundRobinGroupChat(team_of(client, stream, "planner"), termination_condition=MaxMessageTermination(2))
    await team.run(task=TASK)
    state = await team.save_state()
    await team.run(task="And which of these towns is the largest one? Say why you think so, in a sentence or two.")
    assert len(sessions(client)) == 1
    restored = RoundRobinGroupChat(team_of(client, stream, "planner"), termination_condition=MaxMessageTermination(2))
    await restored.load_state(state)
    with session_scope(team._team_id):
        await restored.run(task="And which of them is the smallest one? Say why, please, in a sentence or two.")
    assert len(sessions(client)) == 1
    assert placeholders(client, fake(client).requests[-1])["agent:planner:response"] == SAID["planner"]


async def test_termination_by_text_and_by_token(make, stream):
    client = make(say, engine={"token_latency": 0.05, "delta_tokens": 1})
    token = CancellationToken()
    team = RoundRobinGroupChat(team_of(client, stream, "planner", "solver"))
    task = asyncio.create_task(team.run(task=TASK, cancellation_token=token))
    await until_asked(client)
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert [request.params.agent for request in fake(client).aborted] == ["planner"]

    quick = make(say)
    ended = await RoundRobinGroupChat(
        team_of(quick, stream, "planner", "solver"), termination_condition=TextMentionTermination("Honfleur")
    ).run(task=TASK)
    assert ended.messages[-1].source == "solver"


async def test_names_can_be_shown_to_the_model(make, stream):
    """Chat templates show no names; with prefixes an agent knows who said what, and contents are still found."""
    client = make(say, add_name_prefixes=True)
    team = RoundRobinGroupChat(
        team_of(client, stream, "planner", "solver"), termination_condition=MaxMessageTermination(4)
    )
    await team.run(task=TASK)
    request = requests_of(client, "solver")[0]
    assert f"planner said:\n{SAID['planner']}" in request.prompt.text
    assert placeholders(client, request)["agent:planner:response"] == SAID["planner"]


async def test_alternation_strict_template(make, stream):
    """Several messages of one role in a row, as every team makes them, on a template that wants turns."""
    from ag_helpers import STRICT, byte_tokenizer

    client = make(say, template=byte_tokenizer(STRICT))
    team = RoundRobinGroupChat(
        team_of(client, stream, "planner", "solver", "critic"), termination_condition=MaxMessageTermination(5)
    )
    result = await team.run(task=TASK)
    assert len(result.messages) == 5
    critic = requests_of(client, "critic")[0]
    assert TASK + SEPARATOR + SAID["planner"] + SEPARATOR + SAID["solver"] in critic.prompt.text
    assert set(placeholders(client, critic).values()) == {TASK, SAID["planner"], SAID["solver"]}
