"""autogen-core: routed agents on a runtime. An agent's type names it, and the topic's source is its session."""

from __future__ import annotations

from dataclasses import dataclass

from autogen_common import TASK, run
from autogen_core import (
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    TopicId,
    TypeSubscription,
    message_handler,
)
from autogen_core.models import SystemMessage, UserMessage

from kvcomm_integrations.autogen import KVCommChatCompletionClient


@dataclass
class Problem:
    """What is to be solved."""

    text: str


@dataclass
class Solution:
    """A problem and what somebody said about it."""

    problem: str
    text: str


class Solver(RoutedAgent):
    """Solves a problem and publishes the solution."""

    def __init__(self, client: KVCommChatCompletionClient) -> None:
        super().__init__("Solves word problems.")
        self._client = client

    @message_handler
    async def solve(self, message: Problem, ctx: MessageContext) -> None:
        """Ask the model, and tell the critic."""
        asked = [SystemMessage(content="You are a mathematician."), UserMessage(content=message.text, source="user")]
        result = await self._client.create(asked, cancellation_token=ctx.cancellation_token)
        await self.publish_message(Solution(message.text, str(result.content)), TopicId("solution", self.id.key))


class Critic(RoutedAgent):
    """Criticises a solution."""

    def __init__(self, client: KVCommChatCompletionClient) -> None:
        super().__init__("Criticises solutions.")
        self._client = client

    @message_handler
    async def criticise(self, message: Solution, ctx: MessageContext) -> None:
        """Read the problem and the solution, both of which are loaded."""
        asked = [
            SystemMessage(content="You are a strict critic. Check the solution of this problem."),
            UserMessage(content=message.problem, source="user"),
            UserMessage(content=message.text, source="solver"),
        ]
        result = await self._client.create(asked, cancellation_token=ctx.cancellation_token)
        print(f"---------- {self.id} ----------\n{result.content}")


async def main(client: KVCommChatCompletionClient) -> None:
    """Two sessions at once; neither loads what the other has read."""
    runtime = SingleThreadedAgentRuntime()
    await Solver.register(runtime, "solver", lambda: Solver(client))
    await Critic.register(runtime, "critic", lambda: Critic(client))
    await runtime.add_subscription(TypeSubscription("problem", "solver"))
    await runtime.add_subscription(TypeSubscription("solution", "critic"))
    runtime.start()
    for session in ("monday", "tuesday"):
        await runtime.publish_message(Problem(f"It is {session}. {TASK}"), TopicId("problem", session))
    await runtime.stop_when_idle()


if __name__ == "__main__":
    run(main)
