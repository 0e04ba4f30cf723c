"""Map and reduce: one node reads many documents at once (``Send``), another reads all its answers, which are loaded."""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from langgraph_common import chat_model

QUESTION = "Which of the three farms needs the most hay in a week, and how many bales would all of them need together?"
DOCUMENTS = [
    "The northern farm keeps 12 cows and 15 sheep. Its barn is dry, and it buys hay once a month from a dealer.",
    "The eastern farm keeps 7 cows, 40 sheep and two old horses. It makes its own hay, but not enough for the winter.",
    "The farm by the river keeps 31 cows. Its meadows are wet until June, so that it has to buy nearly all of its hay.",
]


class Library(TypedDict, total=False):
    """A question, documents, and a note on each."""

    question: str
    documents: list[str]
    notes: Annotated[list[str], operator.add]
    answer: str


class Page(TypedDict):
    """What one reader gets."""

    question: str
    document: str


def build(model: BaseChatModel) -> Any:
    """Readers, one for each document, and an editor."""

    def share_out(state: Library) -> list[Send]:
        return [Send("reader", {"question": state["question"], "document": text}) for text in state["documents"]]

    def reader(state: Page) -> Library:
        note = model.invoke(
            [
                SystemMessage("You take notes. Write down what a document says about a question."),
                HumanMessage(state["question"]),
                HumanMessage(state["document"]),
            ]
        )
        return {"notes": [note.text]}

    def editor(state: Library) -> Library:
        notes = "\n".join(f"- {note.strip()}" for note in state["notes"])
        prompt = f"Answer the question from the notes.\n\nQuestion: {state['question']}\n\nNotes:\n{notes}"
        return {"answer": model.invoke(prompt).text}

    graph = StateGraph(Library)
    graph.add_node("reader", reader)
    graph.add_node("editor", editor)
    graph.add_conditional_edges(START, share_out, ["reader"])
    graph.add_edge("reader", "editor")
    graph.add_edge("editor", END)
    return graph.compile()


def main() -> None:
    print(build(chat_model()).invoke({"question": QUESTION, "documents": DOCUMENTS})["answer"])


if __name__ == "__main__":
    main()
