"""Swarm: agents hand over to one another with a tool call. The whole conversation goes with it, and is loaded."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langgraph_common import TASK, chat_model, show
from langgraph_swarm import create_handoff_tool, create_swarm


def build(model: BaseChatModel) -> Any:
    """A planner and a solver who can hand over to each other."""
    planner = create_agent(
        model,
        [create_handoff_tool(agent_name="solver")],
        name="planner",
        system_prompt="You are a planner. Say what has to be computed, then hand over to the solver.",
    )
    solver = create_agent(
        model,
        [create_handoff_tool(agent_name="planner")],
        name="solver",
        system_prompt="You are a mathematician. Compute what the planner asks for.",
    )
    return create_swarm([planner, solver], default_active_agent="planner").compile()


def main() -> None:
    show(build(chat_model()).invoke({"messages": [("user", TASK)]})["messages"])


if __name__ == "__main__":
    main()
