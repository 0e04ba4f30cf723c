"""The demo's application: a fully connected LangGraph, as anybody would write it. Nothing here knows of reuse."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph

ROLES = {
    "planner": "You are the planner of a small team. Read the problem, name the quantities that are given and list "
    "the steps that lead to the answer, in order. Do not compute anything yourself.",
    "solver": "You are the mathematician of a small team. Follow the plan of your colleagues, show every computation "
    "on a line of its own and say clearly which number answers which question.",
    "critic": "You are the critic of a small team. Check each step of your colleagues against the problem, repeat the "
    "computations that look doubtful and say what is wrong and what is right.",
    "writer": "You are the writer of a small team. Use what your colleagues found to write the final answer for a "
    "reader who has not seen their work, in plain and friendly words.",
    "teacher": "You are the teacher of a small team. Explain the idea behind the solution to a child of ten years, "
    "with an example from everyday life and without any formula.",
    "auditor": "You are the auditor of a small team. State for each number in the final answer where it comes from, "
    "and whether the problem really gives it.",
    "translator": "You are the translator of a small team. Restate the final answer in simple English for readers who "
    "are learning the language, one short sentence for each fact.",
    "archivist": "You are the archivist of a small team. Summarise who contributed what and keep the final numbers, so "
    "that the work can be found again.",
}
"""System prompts by agent name."""


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
