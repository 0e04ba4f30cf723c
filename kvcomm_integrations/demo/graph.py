"""The demo's application: a fully connected LangGraph, as anybody would write it. Reuse shows nowhere in it."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph

from kvcomm_integrations.bench.roles import ROLES


class TeamState(TypedDict):
    """The conversation: the question first, then one answer per agent."""

    messages: Annotated[list[BaseMessage], add_messages]


def team(model: BaseChatModel, agents: list[str]) -> CompiledStateGraph[Any, Any, Any, Any]:
    """A graph in which each agent sees the question and every earlier agent's answer.

    Args:
        model: the chat model all agents share.
        agents: names out of ``ROLES``, in the order in which they speak.
    """
    graph = StateGraph(TeamState)
    for name in agents:
        graph.add_node(name, _node(model, name))
    for before, after in zip([START, *agents], [*agents, END], strict=True):
        graph.add_edge(before, after)
    return graph.compile()


def _node(model: BaseChatModel, name: str) -> Any:
    def speak(state: TeamState) -> TeamState:
        question, *answers = state["messages"]
        heard = [HumanMessage(f"The {answer.name} says:\n{answer.text}") for answer in answers]
        answer = model.invoke([SystemMessage(ROLES[name]), question, *heard])
        assert isinstance(answer, AIMessage)
        answer.name = name
        return {"messages": [answer]}

    return speak
