"""Human in the loop: the graph stops for a person's remark and goes on, in the same session, when it has come."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt
from langgraph_common import TASK, chat_model, show

REMARK = "Please count the bales for seven days, and say on which line you use the discount of the dealer."


def build(model: BaseChatModel) -> Any:
    """A solver drafts, a person remarks, a writer finishes."""

    def solver(state: MessagesState) -> dict[str, Any]:
        instructions = SystemMessage("You are a mathematician. Show every computation.")
        return {"messages": [model.invoke([instructions, *state["messages"]])]}

    def person(state: MessagesState) -> dict[str, Any]:
        return {"messages": [HumanMessage(interrupt({"draft": state["messages"][-1].text}))]}

    def writer(state: MessagesState) -> dict[str, Any]:
        instructions = SystemMessage("You are a writer. Rewrite the draft as the reader asked.")
        return {"messages": [model.invoke([instructions, *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_sequence([solver, person, writer])
    graph.add_edge(START, "solver")
    graph.add_edge("writer", END)
    return graph.compile(checkpointer=InMemorySaver())


def main() -> None:
    app = build(chat_model())
    thread = {"configurable": {"thread_id": "hay"}}
    app.invoke({"messages": [("user", TASK)]}, thread)
    show(app.invoke(Command(resume=REMARK), thread)["messages"])


if __name__ == "__main__":
    main()
