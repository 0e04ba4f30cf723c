"""A team as YAML, ready to paste into AutoGen Studio, and back again. Starts no engine.

Newer versions of AutoGen load only providers they trust; before loading a config there, set
``AUTOGEN_ALLOWED_PROVIDER_NAMESPACES=kvcomm_integrations``. The server's key, if there is one, is no part of the
config: it is read from ``KVCOMM_API_KEY``.
"""

from __future__ import annotations

import yaml
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import Team
from autogen_agentchat.teams import RoundRobinGroupChat

from kvcomm_integrations.autogen import KVCommChatCompletionClient


def main() -> str:
    """Write a team, read it, and return the YAML."""
    client = KVCommChatCompletionClient(
        model="Qwen/Qwen2.5-1.5B-Instruct",
        temperature=0,
        max_model_len=8192,
        reuse={"policy": "ridge", "store_bytes": 4 << 30},
    )
    agents = [
        AssistantAgent("planner", model_client=client, system_message="You plan."),
        AssistantAgent("writer", model_client=client, system_message="You write."),
    ]
    written = yaml.safe_dump(RoundRobinGroupChat(agents, max_turns=4).dump_component().model_dump(), sort_keys=False)
    team = Team.load_component(yaml.safe_load(written))
    assert isinstance(team, RoundRobinGroupChat)
    return written


if __name__ == "__main__":
    print(main())
