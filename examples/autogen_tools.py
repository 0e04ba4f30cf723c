"""One AssistantAgent with a tool and ``reflect_on_tool_use``: the second call loads what the first has read."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.ui import Console
from autogen_common import TASK, run

from kvcomm_integrations.autogen import KVCommChatCompletionClient


def hay_price(bales: int) -> str:
    """The price of bales of hay in dollars.

    Args:
        bales: How many bales are bought at once.
    """
    price = 4 * bales * (0.8 if bales > 300 else 1)
    return f"{bales} bales of hay bought at once cost {price:.2f} dollars, all discounts included."


async def main(client: KVCommChatCompletionClient) -> None:
    """Ask for a price, look it up, and answer in words."""
    agent = AssistantAgent(
        "buyer",
        model_client=client,
        tools=[hay_price],
        reflect_on_tool_use=True,
        system_message="You buy hay. Call hay_price with the number of bales you need.",
    )
    await Console(agent.run_stream(task=f"{TASK} Look up what 357 bales cost."))


if __name__ == "__main__":
    run(main)
