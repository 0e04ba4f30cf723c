"""Which agent and which session a call belongs to, outside teams and at the edges of what AutoGen tells."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from ag_helpers import agents, fake, placeholders, requests_of, sessions, who
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core import (
    AgentId,
    MessageContext,
    MessageHandlerContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    TopicId,
    TypeSubscription,
    message_handler,
)
from autogen_core.memory import ListMemory, MemoryContent
from autogen_core.models import AssistantMessage, CreateResult, SystemMessage, UserMessage

from kvcomm_integrations.autogen import session_scope
from kvcomm_integrations.autogen.identity import _AgentNames, agent_name, identify

QUESTION = "How does the river Seine reach the sea, and which towns does it pass on its way there? Answer in detail."
LINE = "It passes Mantes, Vernon, Les Andelys and Rouen, and it meets the sea between Le Havre and Honfleur."


def messages(system=None, *sources):
    start = [SystemMessage(content=system)] if system else []
    return [
        *start,
        *(AssistantMessage(content="x", source=s) for s in sources),
        UserMessage(content="q", source="user"),
    ]


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent_type", "key", "name"),
    [
        ("writer_5f", "5f", "writer"),
        ("my_writer_5f", "5f", "my_writer"),
        ("writer", "default", "writer"),
        ("writer", "writer", "writer"),
        ("_x", "x", "_x"),
    ],
)
def test_agent_name(agent_type, key, name):
    assert agent_name(AgentId(agent_type, key)) == name


def test_outside_any_runtime():
    assert identify(messages()).agent == "default"
    assert identify(messages("Be brief.")).agent.startswith("agent-")
    assert identify(messages("Be brief.")) == identify(messages("Be brief."))
    assert identify(messages("Be brief.")) != identify(messages("Be long."))
    assert identify(messages("Be brief.", "writer", "critic")).agent == "critic"
    assert identify(messages()).session == "default"


def test_what_is_said_wins():
    with session_scope("scope"):
        assert identify(messages("s", "writer"), agent="a", session="s").agent == "a"
        assert identify(messages(), session="s").session == "s"
        assert identify(messages()).session == "scope"
    with MessageHandlerContext.populate_context(AgentId("writer_5f", "5f")):
        assert identify(messages()).session == "5f"
        with session_scope("outer"), session_scope("inner"):
            assert identify(messages()).session == "inner"
        assert identify(messages(), agent="a").agent == "a"


def test_long_names_are_cut():
    who = identify(messages(), agent="a" * 900, session="s" * 900)
    assert len(f"agent:{who.agent}:response") <= 256 and len(who.session) <= 256


def test_agents_in_one_handler_are_told_apart_by_their_system_message():
    names, running = _AgentNames(10), AgentId("outer_5f", "5f")
    assert names.name(running, "aa") == "outer"
    assert names.name(running, "bb") == "outer/bb"  # nothing is known of how it came to run
    names.note_calls(running, ["helper"])
    assert names.name(running, "cc") == "outer/helper"
    names.note_calls(running, ["helper", "other"])
    assert names.name(running, "dd") == "outer/dd"
    assert names.name(running, "") == "outer/inner"
    assert [names.name(running, key) for key in ("aa", "bb", "cc")] == ["outer", "outer/bb", "outer/helper"]
    assert names.name(AgentId("outer_66", "66"), "bb") == "outer"


def test_an_agent_that_writes_its_system_message_afresh_keeps_its_name():
    names, running = _AgentNames(10), AgentId("clock_5f", "5f")
    found = [names.name(running, f"{i:x}") for i in range(100)]
    assert found[0] == found[-1] == "clock"
    assert len(set(found)) <= 16


def test_memory_of_agents_is_bounded():
    names = _AgentNames(2)
    for i in range(5):
        names.name(AgentId(f"a_{i}", str(i)), "x")
    assert len(names._seen) == 2


# ---- settings --------------------------------------------------------------------------------------------------------


async def test_client_settings_name_agent_and_session(make):
    client = make("ok", agent="mine", session="s")
    await AssistantAgent("a", model_client=client).run(task="q")
    team = RoundRobinGroupChat([AssistantAgent("b", model_client=client)], max_turns=1)
    await team.run(task="q")
    assert who(client) == [("mine", "s"), ("mine", "s")]


async def test_standalone_agents_learn_their_name(make):
    client = make("ok")
    writer = AssistantAgent("writer", model_client=client, system_message="You write.")
    await writer.run(task="q")
    await writer.run(task="q again")
    assert agents(client)[0].startswith("agent-") and agents(client)[1] == "writer"
    assert sessions(client) == {"default"}


async def test_standalone_agents_share_within_a_scope(make):
    client = make(LINE)
    with session_scope("ticket"):
        await AssistantAgent("one", model_client=client, system_message="You are one.").run(task=QUESTION)
        await AssistantAgent("two", model_client=client, system_message="You are two.").run(task=f"{QUESTION}\n{LINE}")
    assert sessions(client) == {"ticket"}
    assert set(placeholders(client, fake(client).requests[1]).values()) == {QUESTION, LINE}


async def test_agent_tool_without_a_team(make):
    def script(request):
        if "You are the writer" in request.prompt.text:
            return LINE
        call = f'<tool_call>\n{{"name": "writer", "arguments": {{"task": "{QUESTION}"}}}}\n</tool_call>'
        return "Done." if LINE in request.prompt.text else call

    client = make(script)
    writer = AssistantAgent("writer", model_client=client, system_message="You are the writer.", description="Writes.")
    boss = AssistantAgent(
        "boss",
        model_client=client,
        system_message="You lead.",
        tools=[AgentTool(writer, return_value_as_last_message=True)],
        max_tool_iterations=2,
    )
    result = await boss.run(task="Write about the Seine.")
    assert result.messages[-1].content == "Done."
    first, inner, last = agents(client)
    assert last == "boss" and len({first, inner, last}) == 3
    assert LINE in placeholders(client, fake(client).requests[2]).values()


async def test_two_agents_inside_one_custom_agent(make):
    """A pattern of many applications: one chat agent that drives others by hand."""
    client = make(LINE)

    class Pair(BaseChatAgent):
        def __init__(self):
            super().__init__("pair", "Two in one.")
            self._one = AssistantAgent("one", model_client=client, system_message="You are one.")
            self._two = AssistantAgent("two", model_client=client, system_message="You are two.")

        @property
        def produced_message_types(self):
            return (TextMessage,)

        async def on_messages(self, messages, cancellation_token):
            first = await self._one.on_messages(messages, cancellation_token)
            second = await self._two.on_messages([first.chat_message], cancellation_token)
            return Response(chat_message=TextMessage(content=second.chat_message.content, source=self.name))

        async def on_reset(self, cancellation_token):
            pass

    team = RoundRobinGroupChat([Pair()], max_turns=2)
    await team.run(task=QUESTION)
    first, second, third, fourth = agents(client)
    assert first == "pair" == third
    assert second == fourth != "pair" and second.startswith("pair/")
    assert sessions(client) == {team._team_id}


async def test_memory_does_not_change_who_an_agent_is(make):
    client = make("ok")
    memory = ListMemory()
    agent = AssistantAgent("a", model_client=client, memory=[memory], system_message="You are a.")
    team = RoundRobinGroupChat([agent], max_turns=1)
    await team.run(task="q")
    await memory.add(MemoryContent(content="The user likes short answers.", mime_type="text/plain"))
    await team.run(task="q")
    assert agents(client) == ["a", "a"]
    assert "The user likes short answers." in fake(client).requests[1].prompt.text


async def test_threads_and_loops_do_not_leak_scopes(make):
    client = make("ok")

    async def run(name):
        with session_scope(name):
            await asyncio.sleep(0.01)
            await AssistantAgent("a", model_client=client).run(task="q")

    await asyncio.gather(*(run(f"s{i}") for i in range(5)))
    assert sessions(client) == {f"s{i}" for i in range(5)}
    assert identify(messages()).session == "default"


# ---- autogen-core ----------------------------------------------------------------------------------------------------


@dataclass
class Task:
    text: str


@dataclass
class Draft:
    task: str
    text: str


class Writer(RoutedAgent):
    """Answers a task, and publishes its draft."""

    def __init__(self, client, stream):
        super().__init__("Writes.")
        self._client, self._stream = client, stream

    @message_handler
    async def on_task(self, message: Task, ctx: MessageContext) -> None:
        asked = [SystemMessage(content="You write."), UserMessage(content=message.text, source="user")]
        result = await ask(self._client, asked, self._stream, ctx)
        await self.publish_message(Draft(message.text, result.content), topic_id=TopicId("draft", self.id.key))


class Critic(RoutedAgent):
    """Comments on a draft."""

    def __init__(self, client, stream):
        super().__init__("Criticises.")
        self._client, self._stream = client, stream

    @message_handler
    async def on_draft(self, message: Draft, ctx: MessageContext) -> None:
        asked = [
            SystemMessage(content="You criticise."),
            UserMessage(content=message.task, source="user"),
            UserMessage(content=message.text, source="writer"),
        ]
        await ask(self._client, asked, self._stream, ctx)


async def ask(client, asked, stream, ctx):
    if not stream:
        return await client.create(asked, cancellation_token=ctx.cancellation_token)
    async for item in client.create_stream(asked, cancellation_token=ctx.cancellation_token):
        if isinstance(item, CreateResult):
            return item
    raise AssertionError


@pytest.mark.parametrize("stream", [False, True])
async def test_routed_agents(make, reports, stream):
    """Agent types name the agents, and the topic's source is the session: two of them run at once."""
    client = make(LINE, engine={"token_latency": 0.001})
    runtime = SingleThreadedAgentRuntime()
    await Writer.register(runtime, "writer", lambda: Writer(client, stream))
    await Critic.register(runtime, "critic", lambda: Critic(client, stream))
    await runtime.add_subscription(TypeSubscription("task", "writer"))
    await runtime.add_subscription(TypeSubscription("draft", "critic"))
    runtime.start()
    for session in ("ticket-1", "ticket-2"):
        await runtime.publish_message(Task(f"{session}: {QUESTION}"), TopicId("task", session))
    await runtime.stop_when_idle()
    assert sorted(who(client)) == sorted((a, s) for a in ("writer", "critic") for s in ("ticket-1", "ticket-2"))
    for request in requests_of(client, "critic"):
        assert placeholders(client, request) == {
            "user_question": f"{request.params.session}: {QUESTION}",
            "agent:writer:response": LINE,
        }
    loaded = {report.session: report.loaded for report in reports() if report.agent == "critic"}
    assert all(loaded.values()) and len(loaded) == 2
