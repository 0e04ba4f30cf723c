"""Functional API: agents are tasks of an entrypoint, and are named after it and their function."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage
from langgraph.func import entrypoint, task
from langgraph_common import TASK, chat_model, show


def build(model: BaseChatModel) -> Any:
    """Two estimators work at the same time, then a judge reads both."""

    @task
    def estimate(question: str, advice: str) -> AIMessage:
        return model.invoke([SystemMessage(f"You estimate. {advice}"), HumanMessage(question)])

    @task
    def judge(question: str, answers: list[AIMessage]) -> AIMessage:
        heard = [HumanMessage(f"An estimate:\n{answer.text}") for answer in answers]
        return model.invoke([SystemMessage("You are a judge of estimates."), HumanMessage(question), *heard])

    @entrypoint()
    def panel(question: str) -> list[AnyMessage]:
        begun = [estimate(question, advice) for advice in ("Round up where in doubt.", "Round down where in doubt.")]
        answers = [future.result() for future in begun]
        return [*answers, judge(question, answers).result()]

    return panel


def main() -> None:
    show(build(chat_model()).invoke(TASK))


if __name__ == "__main__":
    main()
