"""RAG with tools: what a tool found for one agent is loaded when the next agent reads it."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph_common import chat_model, show

QUESTION = "How much hay does a cow eat per day, how much does a sheep eat, and what does one bale of hay weigh?"
HANDBOOK = (
    "Farm handbook, chapter 4. A grown cow eats about 12 kilograms of hay per day, more in winter and when it gives "
    "milk; a sheep eats about 2 kilograms. A small bale of hay weighs 15 kilograms, a large one 250 kilograms. Hay "
    "that has become wet must not be fed."
)


@tool
def search_handbook(query: str) -> str:
    """Find the chapter of the farm handbook that answers a query."""
    return HANDBOOK


def build(model: BaseChatModel) -> Any:
    """A researcher with a search tool, and an editor who reads what was found."""
    researcher_model = model.bind_tools([search_handbook])

    def researcher(state: MessagesState) -> dict[str, Any]:
        instructions = SystemMessage("You are a researcher. Search the handbook before you answer.")
        return {"messages": [researcher_model.invoke([instructions, *state["messages"]])]}

    def editor(state: MessagesState) -> dict[str, Any]:
        instructions = SystemMessage("You are an editor. Rewrite the last answer so that the handbook bears it out.")
        return {"messages": [model.invoke([instructions, *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node(researcher)
    graph.add_node(ToolNode([search_handbook]))
    graph.add_node(editor)
    graph.add_edge(START, "researcher")
    graph.add_conditional_edges("researcher", tools_condition, {"tools": "tools", END: "editor"})
    graph.add_edge("tools", "researcher")
    graph.add_edge("editor", END)
    return graph.compile()


def main() -> None:
    show(build(chat_model()).invoke({"messages": [("user", QUESTION)]})["messages"])


if __name__ == "__main__":
    main()
