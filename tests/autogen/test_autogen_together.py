"""AutoGen and LangGraph in one process on one engine."""

from __future__ import annotations

import pytest
from ag_helpers import fake, placeholders
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat

from kvcomm_integrations.autogen import session_scope

pytest.importorskip("langgraph")

from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, MessagesState, StateGraph

from kvcomm_integrations.langchain import ChatKVComm

QUESTION = "How does the river Seine reach the sea, and which towns does it pass on its way there? Answer in detail."
LINES = {
    "planner": "First list the towns along the river from Paris downwards, then describe the estuary near the sea.",
    "writer": "From Paris the Seine winds past Poissy, Vernon and Rouen, and meets the sea at Le Havre and Honfleur.",
}


def graph_of(model):
    def writer(state):
        return {"messages": [model.invoke([SystemMessage("You write."), *state["messages"]])]}

    builder = StateGraph(MessagesState)
    builder.add_node("writer", writer)
    builder.add_edge(START, "writer")
    builder.add_edge("writer", END)
    return builder.compile()


async def test_one_engine_one_session(make, reports):
    """What an AutoGen team has said is loaded by a LangGraph node, and the other way round."""
    client = make(lambda request: LINES[request.params.agent])
    model = ChatKVComm(model="fake", engine=fake(client))
    with session_scope("ticket-17"):
        team = RoundRobinGroupChat(
            [AssistantAgent("planner", model_client=client, system_message="You plan.")], max_turns=1
        )
        said = (await team.run(task=QUESTION)).messages[-1].content
        config = {"configurable": {"kvcomm_session": "ticket-17"}}
        answer = await graph_of(model).ainvoke({"messages": [HumanMessage(QUESTION), HumanMessage(said)]}, config)
        again = RoundRobinGroupChat(
            [AssistantAgent("planner", model_client=client, system_message="You plan again.")], max_turns=1
        )
        await again.run(task=answer["messages"][-1].content)
    team_request, graph_request, last = fake(client).requests
    assert [r.params.session for r in fake(client).requests] == ["ticket-17"] * 3
    assert team_request.params.agent == "planner" and graph_request.params.agent == "writer"
    assert set(placeholders(client, graph_request).values()) == {QUESTION, LINES["planner"]}
    assert LINES["writer"] in placeholders(client, last).values()
    assert answer["messages"][-1].response_metadata["kvcomm"]["loaded"] > 0


async def test_one_engine_two_sessions(make):
    client = make(lambda request: LINES.get(request.params.agent, "ok"))
    model = ChatKVComm(model="fake", engine=fake(client))
    team = RoundRobinGroupChat(
        [AssistantAgent("planner", model_client=client, system_message="You plan.")], max_turns=1
    )
    await team.run(task=QUESTION)
    answer = await graph_of(model).ainvoke({"messages": [HumanMessage(QUESTION)]})
    assert answer["messages"][-1].response_metadata["kvcomm"]["loaded"] == 0
    assert client.runtime is model.runtime
