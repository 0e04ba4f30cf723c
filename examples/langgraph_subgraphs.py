"""Subgraphs: teams within a team. All of them are one session, and each agent is named by the path to it."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import SystemMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph_common import TASK, chat_model, show


def build(model: BaseChatModel) -> Any:
    """A team that solves, a team that writes."""
    solving = _chain(
        planner=_agent(model, "You are a planner. List the steps that lead to the answer."),
        solver=_agent(model, "You are a mathematician. Follow the plan and show every computation."),
    )
    writing = _chain(writer=_agent(model, "You are a writer. Give the answer in plain and friendly words."))
    return _chain(solving=solving, writing=writing)


def _agent(model: BaseChatModel, instructions: str) -> Any:
    def speak(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke([SystemMessage(instructions), *state["messages"]])]}

    return speak


def _chain(**nodes: Any) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_sequence(list(nodes.items()))
    graph.add_edge(START, next(iter(nodes)))
    graph.add_edge(list(nodes)[-1], END)
    return graph.compile()


def main() -> None:
    show(build(chat_model()).invoke({"messages": [("user", TASK)]})["messages"])


if __name__ == "__main__":
    main()
