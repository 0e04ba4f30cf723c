"""SelectorGroupChat: a model chooses who speaks next. The selector's transcript holds answers that are loaded too."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import SelectorGroupChat
from autogen_agentchat.ui import Console
from autogen_common import TASK, run

from kvcomm_integrations.autogen import KVCommChatCompletionClient

ROLES = {
    "planner": "Lists the steps that lead to the answer.",
    "solver": "Computes, step by step.",
    "critic": "Checks the computation of the others.",
}


async def main(client: KVCommChatCompletionClient) -> None:
    """Three turns, chosen by the same model that answers."""
    agents = [
        AssistantAgent(name, model_client=client, description=role, system_message=f"You are the {name}. {role}")
        for name, role in ROLES.items()
    ]
    team = SelectorGroupChat(agents, model_client=client, max_turns=3)
    await Console(team.run_stream(task=TASK))


if __name__ == "__main__":
    run(main)
