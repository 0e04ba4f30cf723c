"""Debate: prompts are f-strings into which the others' answers are pasted. They are found there and loaded."""

from __future__ import annotations

from typing import Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph_common import chat_model

TOPIC = (
    "Should a town of forty thousand people close its old market square to cars, although half of the shops there say "
    "that most of their customers come by car and the next car park is ten minutes away on foot?"
)


class Debate(TypedDict, total=False):
    """The question, and what each side has said."""

    topic: str
    favour: str
    against: str
    verdict: str


def build(model: BaseChatModel) -> Any:
    """One speaker in favour, one against, and a judge who reads both."""

    def favour(state: Debate) -> Debate:
        prompt = f"You speak in favour. The question of this debate:\n{state['topic']}\n\nState your case."
        return {"favour": model.invoke(prompt).text}

    def against(state: Debate) -> Debate:
        prompt = f"""You speak against. The question of this debate:
{state["topic"]}

Your opponent said:
"{state["favour"].strip()}"

Answer them."""
        return {"against": model.invoke(prompt).text}

    def judge(state: Debate) -> Debate:
        prompt = f"""You are the judge. The question of this debate: {state["topic"]}

- In favour: {state["favour"].strip()}
- Against: {state["against"].strip()}

Who argued better?"""
        return {"verdict": model.invoke(prompt).text}

    graph = StateGraph(Debate)
    graph.add_sequence([favour, against, judge])
    graph.add_edge(START, "favour")
    graph.add_edge("judge", END)
    return graph.compile()


def main() -> None:
    for key, text in build(chat_model()).invoke({"topic": TOPIC}).items():
        print(f"{key}: {text}\n")


if __name__ == "__main__":
    main()
