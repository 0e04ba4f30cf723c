"""Swarm: agents hand over to one another with a tool call. The whole conversation goes with it, and is loaded."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import HandoffTermination, MaxMessageTermination
from autogen_agentchat.teams import Swarm
from autogen_agentchat.ui import Console
from autogen_common import TASK, run

from kvcomm_integrations.autogen import KVCommChatCompletionClient


async def main(client: KVCommChatCompletionClient) -> None:
    """A planner hands over to a solver, who hands back to the user."""
    planner = AssistantAgent(
        "planner",
        model_client=client,
        handoffs=["solver"],
        system_message="You are a planner. Say what has to be computed, then call transfer_to_solver.",
    )
    solver = AssistantAgent(
        "solver",
        model_client=client,
        handoffs=["user"],
        system_message="You are a mathematician. Compute what you are asked, then call transfer_to_user.",
    )
    team = Swarm([planner, solver], termination_condition=HandoffTermination("user") | MaxMessageTermination(5))
    await Console(team.run_stream(task=TASK))


if __name__ == "__main__":
    run(main)
