"""GraphFlow: two agents work at the same time, and a third reads both answers."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow
from autogen_agentchat.ui import Console
from autogen_common import TASK, run

from kvcomm_integrations.autogen import KVCommChatCompletionClient

ROLES = {
    "planner": "You are a planner. List the steps that lead to the answer, without computing anything.",
    "solver": "You are a careful mathematician. Follow the plan and show every computation.",
    "estimator": "You are an experienced engineer. Estimate the result roughly, in round numbers.",
    "writer": "You write the final answer in two sentences. Say whether estimate and computation agree.",
}


async def main(client: KVCommChatCompletionClient) -> None:
    """planner -> solver and estimator -> writer."""
    planner, solver, estimator, writer = (
        AssistantAgent(name, model_client=client, system_message=role) for name, role in ROLES.items()
    )
    builder = DiGraphBuilder()
    for agent in (planner, solver, estimator, writer):
        builder.add_node(agent)
    builder.add_edge(planner, solver).add_edge(planner, estimator)
    builder.add_edge(solver, writer).add_edge(estimator, writer)
    team = GraphFlow([planner, solver, estimator, writer], graph=builder.build())
    await Console(team.run_stream(task=TASK))


if __name__ == "__main__":
    run(main)
