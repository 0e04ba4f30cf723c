"""Component configs: clients and whole teams as JSON and YAML, without secrets, ready for AutoGen Studio."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml
from ag_helpers import agents
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import Team
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import (
    DiGraphBuilder,
    GraphFlow,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
    Swarm,
)
from autogen_core import ComponentModel
from autogen_core.models import ChatCompletionClient, UserMessage
from autogen_core.tools import FunctionTool
from pydantic import BaseModel

from kvcomm_integrations.autogen import KVCommChatCompletionClient, KVCommClientConfig
from kvcomm_integrations.config import Isolation, ReuseConfig, Tokenization
from kvcomm_integrations.engines import registry as shared
from kvcomm_integrations.engines.fake import FakeEngine
from kvcomm_integrations.wire import Mode

SETTINGS = {
    "model": "org/some-model",
    "temperature": 0.25,
    "max_tokens": 64,
    "stop": ["###"],
    "seed": 7,
    "logit_bias": {5: -1.5},
    "parallel_tool_calls": False,
    "chat_template_kwargs": {"enable_thinking": False},
    "tenant": "acme",
    "mode": Mode.OBSERVE,
    "policy": "aligned",
    "add_name_prefixes": True,
    "model_info": {"family": "qwen"},
    "reuse": ReuseConfig(policy="kvcomm", isolation=Isolation.TENANT, repair_depth=16, policy_options={"anchors": 20}),
    "dtype": "float32",
    "max_model_len": 2048,
    "block_size": 128,
    "tokenization": Tokenization.CANONICAL,
    "engine_args": {"gpu_memory_utilization": 0.5},
}


def through_json(component: ComponentModel) -> dict:
    return json.loads(component.model_dump_json())


def through_yaml(component: ComponentModel) -> dict:
    return yaml.safe_load(yaml.safe_dump(component.model_dump()))


BOTH = pytest.mark.parametrize("through", [through_json, through_yaml])


@BOTH
def test_a_client_round_trips(through):
    client = KVCommChatCompletionClient(**SETTINGS)
    plain = through(client.dump_component())
    assert plain["provider"] == "kvcomm_integrations.autogen.KVCommChatCompletionClient"
    assert plain["component_type"] == "model"
    assert plain["config"]["reuse"] == {
        "policy": "kvcomm", "isolation": "tenant", "repair_depth": 16, "policy_options": {"anchors": 20}
    }  # fmt: skip
    loaded = ChatCompletionClient.load_component(plain)
    assert isinstance(loaded, KVCommChatCompletionClient)
    assert loaded._config == client._config
    assert loaded._config.engine_config() == client._config.engine_config()
    assert loaded.model_info == client.model_info
    assert through(loaded.dump_component()) == plain


def test_every_setting_is_in_the_dump():
    dumped = KVCommChatCompletionClient(**SETTINGS, base_url="http://x/v1", agent="a", session="s", timeout=3,
                                        tool_parser="hermes", reasoning_parser="deepseek_r1", top_p=1, top_k=2,
                                        min_p=0.1, presence_penalty=1, frequency_penalty=1, repetition_penalty=1,
                                        stop_token_ids=[1], logprobs=True, top_logprobs=2, tokenizer="t",
                                        http={"retries": 5}).dump_component()  # fmt: skip
    assert set(KVCommClientConfig.model_fields) - set(dumped.config) == {"api_key"}


def test_the_least_config_loads():
    loaded = ChatCompletionClient.load_component(
        {"provider": "kvcomm_integrations.autogen.KVCommChatCompletionClient", "config": {"model": "m"}}
    )
    assert loaded.model_info["family"] == "unknown"
    with pytest.raises(ValueError, match="temprature"):
        ChatCompletionClient.load_component(
            {
                "provider": "kvcomm_integrations.autogen.KVCommChatCompletionClient",
                "config": {"model": "m", "temprature": 1},
            }
        )


@BOTH
def test_secrets_come_from_the_environment(through, monkeypatch):
    monkeypatch.delenv("KVCOMM_API_KEY", raising=False)
    client = KVCommChatCompletionClient(model="m", api_key="very-secret")
    assert client._config.api_key.get_secret_value() == "very-secret"
    plain = through(client.dump_component())
    assert (
        "secret" not in json.dumps(plain) and "secret" not in repr(client._config) and "api_key" not in plain["config"]
    )
    assert ChatCompletionClient.load_component(plain)._config.api_key is None
    monkeypatch.setenv("KVCOMM_API_KEY", "other-secret")
    assert ChatCompletionClient.load_component(plain)._config.api_key.get_secret_value() == "other-secret"


def test_the_schema_is_plain_enough_for_a_form():
    """AutoGen Studio builds its form from the schema."""
    schema = KVCommClientConfig.model_json_schema()
    assert schema["required"] == ["model"]
    json.dumps(schema)
    assert issubclass(KVCommClientConfig, BaseModel)


def test_equal_settings_share_an_engine_with_the_other_adapter():
    pytest.importorskip("langchain_core")
    from kvcomm_integrations.langchain import ChatKVComm

    ours = KVCommChatCompletionClient(model="m", max_model_len=512, temperature=0)
    theirs = ChatKVComm(model="m", max_model_len=512, temperature=1)
    assert ours._config.engine_config().key() == theirs.engine_config.key()


# ---- teams -----------------------------------------------------------------------------------------------------------


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def assistants(client, *names, **kwargs):
    return [
        AssistantAgent(name, model_client=client, description=name, system_message=f"You are {name}.", **kwargs)
        for name in names
    ]


def round_robin(client):
    return RoundRobinGroupChat(assistants(client, "a", "b"), termination_condition=MaxMessageTermination(3))


def selector(client):
    return SelectorGroupChat(assistants(client, "a", "b"), model_client=client, max_turns=2)


def swarm(client):
    (a,) = assistants(client, "a", handoffs=["b"])
    (b,) = assistants(client, "b", handoffs=["a"])
    return Swarm([a, b], max_turns=2)


def graph(client):
    a, b = assistants(client, "a", "b")
    builder = DiGraphBuilder().add_node(a).add_node(b).add_edge(a, b)
    return GraphFlow([a, b], graph=builder.build())


def magentic_one(client):
    return MagenticOneGroupChat(assistants(client, "a", "b"), model_client=client, max_turns=2)


def with_tools(client):
    tool = FunctionTool(weather, description="The weather of a city.", global_imports=[])
    return RoundRobinGroupChat(assistants(client, "a", tools=[tool], reflect_on_tool_use=True), max_turns=1)


def nested(client):
    inner = RoundRobinGroupChat(assistants(client, "b", "c"), name="inner", max_turns=2)
    return RoundRobinGroupChat([*assistants(client, "a"), inner], max_turns=2)


@BOTH
@pytest.mark.parametrize("build", [round_robin, selector, swarm, graph, magentic_one, nested])
def test_a_team_round_trips(build, through):
    team = build(KVCommChatCompletionClient(**SETTINGS))
    plain = through(team.dump_component())
    loaded = Team.load_component(plain)
    assert type(loaded) is type(team)
    assert through(loaded.dump_component()) == plain
    assert json.dumps(plain).count("kvcomm_integrations.autogen.KVCommChatCompletionClient") >= 1


@BOTH
@pytest.mark.filterwarnings(r"ignore:\s*\S+\s+SECURITY WARNING:UserWarning")
def test_a_team_with_tools_loads(through):
    """A loaded function has no source any more, so AutoGen itself cannot dump it once again."""
    team = with_tools(KVCommChatCompletionClient(**SETTINGS))
    loaded = Team.load_component(through(team.dump_component()))
    assert loaded._participants[0]._model_client._config == KVCommClientConfig(**SETTINGS)


@BOTH
async def test_a_loaded_team_runs_on_one_shared_engine(tokenizer, monkeypatch, through):
    client = KVCommChatCompletionClient(model="m", max_model_len=4096)
    engine = FakeEngine(tokenizer, "A few words of an answer.")
    monkeypatch.setitem(shared._engines, client._config.engine_config().key(), engine)
    team = Team.load_component(through(round_robin(client).dump_component()))
    result = await team.run(task="Say something.")
    assert [message.source for message in result.messages] == ["user", "a", "b"]
    assert [request.params.agent for request in engine.requests] == ["a", "b"]
    assert {request.params.session for request in engine.requests} == {team._team_id}
    alone = ChatCompletionClient.load_component(through(client.dump_component()))
    await alone.create([UserMessage(content="q", source="user")])
    assert agents(alone) == ["a", "b", "default"]


# ---- without AutoGen -------------------------------------------------------------------------------------------------

WITHOUT = """
import sys
sys.modules["autogen_core"] = None
import kvcomm_integrations
from kvcomm_integrations import EngineConfig
for load in (
    lambda: kvcomm_integrations.KVCommChatCompletionClient,
    lambda: __import__("kvcomm_integrations.autogen"),
):
    try:
        load()
    except kvcomm_integrations.MissingDependencyError as err:
        assert "kvcomm-integrations[autogen]" in str(err) and isinstance(err, ImportError), err
    else:
        raise SystemExit("no error")
"""


def test_without_autogen_the_error_names_the_extra():
    root = str(__import__("pathlib").Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, cwd=root, timeout=60)
