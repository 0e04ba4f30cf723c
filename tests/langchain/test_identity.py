"""Which agent and which session a call belongs to, in every way LangGraph can make it."""

from __future__ import annotations

import asyncio
import operator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from langgraph.types import Send
from langgraph_supervisor import create_supervisor
from langgraph_swarm import create_handoff_tool, create_swarm
from lc_helpers import details, fake, who

from kvcomm_integrations.langchain.identity import agent_key

QUESTION = "How does the river Seine reach the sea, and which towns does it pass on its way there? Answer in detail."
UUID = "3f0c1a52-7f0e-4d43-8f5b-0a4e4b8f2a10"


class State(TypedDict):
    out: Annotated[list[Any], operator.add]


def graph(*nodes, state=State, **compile_args):
    """A chain of nodes."""
    builder = StateGraph(state)
    names = [node.__name__ for node in nodes]
    for node in nodes:
        builder.add_node(node.__name__, node)
    builder.add_edge(START, names[0])
    for one, other in pairwise(names):
        builder.add_edge(one, other)
    builder.add_edge(names[-1], END)
    return builder.compile(**compile_args)


def agents(model):
    return [agent for agent, _ in who(model)]


def sessions(model):
    return {session for _, session in who(model)}


@pytest.mark.parametrize(
    ("namespace", "agent"),
    [
        (f"writer:{UUID}", "writer"),
        (f"math:{UUID}|agent:{UUID}", "math"),
        (f"alice:{UUID}|model:{UUID}", "alice"),
        (f"team:{UUID}|writer:{UUID}", "team/writer"),
        (f"team:{UUID}|1|writer:{UUID}", "team/writer"),
        (f"team:{UUID}|alice:{UUID}|agent:{UUID}", "team/alice"),
        (f"model:{UUID}", "model"),
        (f"a:b:{UUID}", "a:b"),
        ("", "default"),
    ],
)
def test_agent_from_namespace(namespace, agent):
    assert agent_key({"metadata": {"langgraph_checkpoint_ns": namespace}}) == agent


def test_names_longer_than_the_wire_allows_are_cut(make):
    model = make("ok")
    model.invoke("q", kvcomm={"agent": "a" * 900, "session": "s" * 900})
    params = fake(model).requests[0].params
    assert len(params.agent) <= 256 and len(params.response_name) <= 256 and len(params.session) <= 256


def test_sync_nodes(make):
    model = make("ok")

    def one(state):
        return {"out": [model.invoke("q").content]}

    def two(state):
        return {"out": [chunk.text for chunk in model.stream("q")]}

    def three(state):
        return {"out": model.batch(["q", "q"])}

    graph(one, two, three).invoke({"out": []})
    assert agents(model) == ["one", "two", "three", "three"]
    assert len(sessions(model)) == 1 and sessions(model) != {"default"}


async def test_async_nodes(make):
    model = make("ok")

    async def one(state):
        return {"out": [(await model.ainvoke("q")).content]}

    async def two(state):
        return {"out": [chunk.text async for chunk in model.astream("q")]}

    async def gathered(state):
        return {"out": await asyncio.gather(*(model.ainvoke("q") for _ in range(2)))}

    async def threaded(state):
        return {"out": [await asyncio.to_thread(model.invoke, "q")]}

    async def batched(state):
        return {"out": await model.abatch(["q", "q"])}

    await graph(one, two, gathered, threaded, batched).ainvoke({"out": []})
    assert agents(model) == ["one", "two", "gathered", "gathered", "threaded", "batched", "batched"]
    assert len(sessions(model)) == 1


def test_chains_inside_a_node(make):
    model = make("ok")
    chain = ChatPromptTemplate.from_messages([("human", "{q}")]) | model

    def writer(state):
        return {"out": [chain.invoke({"q": "x"})]}

    graph(writer).invoke({"out": []})
    assert agents(model) == ["writer"]


def test_config_handed_on_by_hand(make):
    model = make("ok")

    def writer(state, config):
        return {"out": [model.invoke("q", config), *model.stream("q", config)]}

    graph(writer, checkpointer=InMemorySaver()).invoke({"out": []}, {"configurable": {"thread_id": "7"}})
    assert who(model) == [("writer", "thread:7")] * 2


def test_raw_threads_have_no_context_and_can_be_told(make):
    model = make("ok")

    def writer(state):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model.invoke, "q").result()
            pool.submit(model.bind(kvcomm={"agent": "told", "session": "s"}).invoke, "q").result()
        return {}

    graph(writer).invoke({"out": []})
    assert who(model) == [("default", "default"), ("told", "s")]


def test_send_runs_the_same_node_many_times(make):
    model = make("ok")

    def worker(state):
        return {"out": [model.invoke("q").content]}

    builder = StateGraph(State)
    builder.add_node("worker", worker)
    builder.add_conditional_edges(START, lambda state: [Send("worker", {"out": []}) for _ in range(3)], ["worker"])
    builder.compile().invoke({"out": []})
    assert agents(model) == ["worker"] * 3
    assert len(sessions(model)) == 1


def test_subgraphs_share_the_run(make):
    model = make("ok")

    def writer(state):
        return {"out": [model.invoke("q").content]}

    def boss(state):
        return {"out": [model.invoke("q").content]}

    builder = StateGraph(State)
    builder.add_node("boss", boss)
    builder.add_node("team", graph(writer))
    builder.add_edge(START, "boss")
    builder.add_edge("boss", "team")
    app = builder.compile()
    app.invoke({"out": []})
    app.invoke({"out": []}, {"run_id": UUID})
    assert agents(model) == ["boss", "team/writer"] * 2
    pairs = who(model)
    assert pairs[0][1] == pairs[1][1] != pairs[2][1] == pairs[3][1]


def test_subgraph_called_inside_a_node(make):
    model = make("ok")

    def writer(state):
        return {"out": [model.invoke("q").content]}

    inner = graph(writer)

    def team(state):
        inner.invoke({"out": []})
        return {"out": inner.invoke({"out": []})["out"]}

    graph(team).invoke({"out": []})
    assert agents(model) == ["team/writer"] * 2
    assert len(sessions(model)) == 1


def test_streaming_a_graph(make):
    model = make("one two three four five six seven")

    def writer(state):
        return {"out": [model.invoke("q").content]}

    for mode in ("values", "updates", "messages", ["values", "messages"]):
        list(graph(writer).stream({"out": []}, stream_mode=mode))
    assert agents(model) == ["writer"] * 4
    assert len(sessions(model)) == 4


def test_threads_are_sessions(make):
    model = make("ok")

    def writer(state):
        return {"out": [model.invoke("q").content]}

    app = graph(writer, checkpointer=InMemorySaver())
    for thread in ("a", "b", "a"):
        app.invoke({"out": []}, {"configurable": {"thread_id": thread}})
    app.invoke({"out": []}, {"configurable": {"thread_id": "a", "kvcomm_session": "mine"}})
    assert [session for _, session in who(model)] == ["thread:a", "thread:b", "thread:a", "mine"]


def test_fields_win(make):
    model = make("ok", agent="fixed", session="s")

    def writer(state):
        return {"out": [model.invoke("q").content]}

    graph(writer).invoke({"out": []})
    assert who(model) == [("fixed", "s")]


@pytest.mark.parametrize("name", ["alice", None])
def test_create_agent(make, name):
    model = make("ok")
    create_agent(model, tools=[], name=name).invoke({"messages": [HumanMessage("q")]})
    assert agents(model) == [name or "model"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_create_react_agent_in_a_team(make):
    model = make("ok")
    alice = create_react_agent(model, [], name="alice")
    bob = create_react_agent(model, [], name="bob")
    builder = StateGraph(MessagesState)
    builder.add_node("alice", alice)
    builder.add_node("bob", bob)
    builder.add_edge(START, "alice")
    builder.add_edge("alice", "bob")
    app = builder.compile()
    app.invoke({"messages": [HumanMessage("q")]})
    await app.ainvoke({"messages": [HumanMessage("q")]})
    assert agents(model) == ["alice", "bob"] * 2
    assert len(sessions(model)) == 2


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("made_by", [create_agent, create_react_agent])
def test_supervisor(make_tools, made_by):
    def script(request):
        if request.params.agent == "supervisor":
            seen = any("The Seine is long" in r.prompt.text for r in model.engine.requests)
            return "done" if seen else call("transfer_to_geo")
        return "The Seine is long, and it flows past Rouen and Le Havre before it meets the sea."

    model = make_tools(script)
    geo = made_by(model, [], name="geo")
    app = create_supervisor([geo], model=model, prompt="You lead.").compile()
    result = app.invoke({"messages": [HumanMessage(QUESTION)]})
    assert agents(model) == ["supervisor", "geo", "supervisor"]
    assert len(sessions(model)) == 1
    assert result["messages"][-1].content == "done"
    last = fake(model).requests[-1]
    assert "agent:geo:response" in [segment.name for segment in last.prompt.segments]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_swarm(make_tools):
    def script(request):
        return "Bonjour from bob." if request.params.agent == "bob" else call("transfer_to_bob")

    model = make_tools(script)
    alice = create_agent(model, [create_handoff_tool(agent_name="bob")], name="alice", system_prompt="You are Alice.")
    bob = create_agent(model, [create_handoff_tool(agent_name="alice")], name="bob", system_prompt="You are Bob.")
    app = create_swarm([alice, bob], default_active_agent="alice").compile()
    result = app.invoke({"messages": [HumanMessage(QUESTION)]})
    assert agents(model) == ["alice", "bob"]
    assert len(sessions(model)) == 1
    assert result["messages"][-1].content == "Bonjour from bob."
    assert next(s for s in model.last_report.segments if s.name == "user_question").loaded > 0


@pytest.mark.parametrize("saver", [None, InMemorySaver])
def test_provenance_survives_into_the_next_agents_history(make, saver):
    answer = "The Seine rises near Dijon and meets the English Channel at Le Havre, after 775 kilometres."
    model = make(answer)

    def geographer(state):
        return {"messages": [model.invoke(state["messages"])]}

    def critic(state):
        return {"messages": [model.invoke([("system", "You object to everything."), *state["messages"]])]}

    app = graph(geographer, critic, state=MessagesState, checkpointer=saver and saver())
    result = app.invoke({"messages": [HumanMessage(QUESTION)]}, {"configurable": {"thread_id": "1"}})
    _, first, second = result["messages"]
    segment_id = first.response_metadata["kvcomm"]["segment_id"]
    content = model.runtime.registry.lookup("thread:1", segment_id)
    assert content is not None and content.text == answer and content.name == "agent:geographer:response"
    names = [segment.name for segment in fake(model).requests[-1].prompt.segments]
    assert "agent:geographer:response" in names and "user_question" in names
    assert details(second)["loaded"] > 0
    assert isinstance(first, AIMessage)
