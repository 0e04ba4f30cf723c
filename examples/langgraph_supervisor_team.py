"""Supervisor: one agent hands the work to others and reads their answers, which are loaded from their caches."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langgraph_common import TASK, chat_model, show
from langgraph_supervisor import create_supervisor


def build(model: BaseChatModel) -> Any:
    """A supervisor with a solver and a critic."""
    solver = create_agent(model, [], name="solver", system_prompt="You are a mathematician. Show every computation.")
    critic = create_agent(model, [], name="critic", system_prompt="You are a critic. Check every computation.")
    lead = "You lead a team of a solver and a critic. Give the work to one of them at a time, then answer yourself."
    return create_supervisor([solver, critic], model=model, prompt=lead).compile()


def main() -> None:
    show(build(chat_model()).invoke({"messages": [("user", TASK)]})["messages"])


if __name__ == "__main__":
    main()
