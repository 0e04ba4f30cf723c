"""RoundRobinGroupChat: agents speak in turn, and each loads what the others have read or said."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.ui import Console
from autogen_common import TASK, run

from kvcomm_integrations.autogen import KVCommChatCompletionClient

ROLES = {
    "planner": "You are a planner. List the steps that lead to the answer, without computing anything.",
    "solver": "You are a careful mathematician. Follow the plan and show every computation.",
    "critic": "You are a strict critic. Check each step of the others and name the errors.",
}


async def main(client: KVCommChatCompletionClient) -> None:
    """Two rounds of three agents."""
    agents = [AssistantAgent(name, model_client=client, system_message=role) for name, role in ROLES.items()]
    team = RoundRobinGroupChat(agents, max_turns=6)
    await Console(team.run_stream(task=TASK))


if __name__ == "__main__":
    run(main)
