"""AgentTool: one agent calls another as a tool. Both are told apart, and share what they have read."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_agentchat.ui import Console
from autogen_common import TASK, run

from kvcomm_integrations.autogen import KVCommChatCompletionClient


async def main(client: KVCommChatCompletionClient) -> None:
    """A planner that may ask a solver, and a critic who reads what came of it.

    Parallel tool calls are off in the client: an agent cannot run twice at the same time.
    """
    solver = AssistantAgent(
        "solver",
        model_client=client,
        description="Solves a word problem.",
        system_message="You are a careful mathematician. Show every computation.",
    )
    planner = AssistantAgent(
        "planner",
        model_client=client,
        tools=[AgentTool(solver, return_value_as_last_message=True)],
        max_tool_iterations=2,
        reflect_on_tool_use=True,
        system_message="You lead a small team. Call the solver with the whole problem, then sum its answer up.",
    )
    critic = AssistantAgent(
        "critic", model_client=client, system_message="You are a strict critic. Check what the others have said."
    )
    team = RoundRobinGroupChat([planner, critic], max_turns=2)
    await Console(team.run_stream(task=TASK))


if __name__ == "__main__":
    run(main)
