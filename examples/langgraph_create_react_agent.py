"""``create_react_agent``: prebuilt agents as nodes of a graph. The second loads what the first has read and said."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from langgraph_common import TASK, chat_model, show


@tool
def hay_price(bales: int) -> str:
    """The price of some bales of hay, discount included."""
    price = bales * 4 * (0.8 if bales > 300 else 1)
    return (
        f"{bales} bales of hay cost {price:.2f} dollars, delivery to the farm and the discount of the dealer included."
    )


def build(model: BaseChatModel) -> Any:
    """A solver with a tool, and a critic."""
    solver = create_react_agent(
        model, [hay_price], name="solver", prompt="You are a mathematician. Show every computation."
    )
    critic = create_react_agent(model, [], name="critic", prompt="You are a critic. Check every computation.")
    graph = StateGraph(MessagesState)
    graph.add_sequence([("solver", solver), ("critic", critic)])
    graph.add_edge(START, "solver")
    graph.add_edge("critic", END)
    return graph.compile()


def main() -> None:
    show(build(chat_model()).invoke({"messages": [("user", TASK)]})["messages"])


if __name__ == "__main__":
    main()
