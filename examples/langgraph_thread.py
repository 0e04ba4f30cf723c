"""A thread with a checkpointer: each turn of the conversation finds everything said before in the same thread."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph_common import TASK, chat_model, show

FOLLOW_UP = "And how much would it be in a leap year, if the dealer took the fifth off for every order that year?"


def build(model: BaseChatModel) -> Any:
    """A solver and a critic who both remember the thread."""

    def solver(state: MessagesState) -> dict[str, Any]:
        instructions = SystemMessage("You are a mathematician. Show every computation.")
        return {"messages": [model.invoke([instructions, *state["messages"]])]}

    def critic(state: MessagesState) -> dict[str, Any]:
        instructions = SystemMessage("You are a critic. Check every computation of your colleague.")
        return {"messages": [model.invoke([instructions, *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_sequence([solver, critic])
    graph.add_edge(START, "solver")
    graph.add_edge("critic", END)
    return graph.compile(checkpointer=InMemorySaver())


def main() -> None:
    app = build(chat_model())
    thread = {"configurable": {"thread_id": "hay"}}
    app.invoke({"messages": [("user", TASK)]}, thread)
    show(app.invoke({"messages": [("user", FOLLOW_UP)]}, thread)["messages"])


if __name__ == "__main__":
    main()
