"""MagenticOneGroupChat: an orchestrator keeps facts, a plan and a ledger. They stand in many prompts, and are loaded.

The team has one member here because the orchestrator's ledger must name the next speaker exactly, which is asking too
much of the small demo model. With a larger model, add more.
"""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import MagenticOneGroupChat
from autogen_agentchat.ui import Console
from autogen_common import TASK, run

from kvcomm_integrations.autogen import KVCommChatCompletionClient


async def main(client: KVCommChatCompletionClient) -> None:
    """An orchestrator and a solver; the ledger follows its JSON schema because tokens are drawn that way."""
    solver = AssistantAgent(
        "solver",
        model_client=client,
        description="A careful mathematician.",
        system_message="You are a careful mathematician. Do what you are told and show every computation.",
    )
    team = MagenticOneGroupChat([solver], model_client=client, max_turns=2)
    await Console(team.run_stream(task=TASK))


if __name__ == "__main__":
    run(main)
