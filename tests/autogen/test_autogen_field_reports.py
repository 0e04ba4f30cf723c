"""Faults that users of AutoGen's model clients have reported: the right behaviour, one kind per test.

Each name says what goes right; the docstring says what went wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ag_helpers import agents, fake
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import SelectorGroupChat
from autogen_core.model_context import BufferedChatCompletionContext, TokenLimitedChatCompletionContext
from autogen_core.models import SystemMessage, UserMessage
from autogen_core.tools import FunctionTool

from kvcomm_integrations.autogen import KVCommChatCompletionClient

QUESTION = [UserMessage(content="Where does the Seine end?", source="user")]


@pytest.mark.parametrize("model", ["my-finetune", "./models/llama", "/data/Qwen2.5", "C:\\models\\x", "org/名前"])
def test_any_model_name_can_be_constructed(model):
    """Construction failed for a local model's name, because it was not in a table."""
    client = KVCommChatCompletionClient(model=model)
    assert client.model_info["function_calling"] is True
    AssistantAgent("a", model_client=client, tools=[FunctionTool(lambda: "x", description="d", name="f")])


async def test_remaining_tokens_of_an_unknown_model(make):
    """remaining_tokens raised KeyError, so token-limited contexts could not be used with local models."""
    client = make("ok", model="nobody/has-heard-of-it", engine={"max_model_len": 300})
    assert 0 < client.remaining_tokens(QUESTION) < 300
    context = TokenLimitedChatCompletionContext(client)
    for i in range(40):
        await context.add_message(UserMessage(content=f"Message number {i} with some more words.", source="user"))
    kept = await context.get_messages()
    assert 0 < len(kept) < 40
    assert client.remaining_tokens(kept) >= 0
    limited = TokenLimitedChatCompletionContext(client, token_limit=200)  # leaves room for the system message
    for message in await context.get_messages():
        await limited.add_message(message)
    agent = AssistantAgent("a", model_client=client, model_context=limited)
    assert (await agent.run(task="And now?")).messages[-1].content == "ok"


async def test_counts_are_the_models_own(make, tokenizer):
    """tiktoken's encoding for another model was used to count an open model's tokens."""
    client = make("ok")
    for text in (
        "plain words",
        "名前とトークン 🙂",
        "def f(x):\n\treturn x ** 2",
        "<|im_end|> is no control token here",
    ):
        messages = [SystemMessage(content="Be brief."), UserMessage(content=text, source="user")]
        result = await client.create(messages)
        assert result.usage.prompt_tokens == len(fake(client).requests[-1].prompt.token_ids)
        if "<|im_end|>" not in text:
            assert client.count_tokens(messages) == result.usage.prompt_tokens
    assert client.count_tokens(QUESTION) == len(
        tokenizer.encode(tokenizer.render([{"role": "user", "content": QUESTION[0].content}]), allow_special=True)
    )


def test_tiktoken_is_never_imported():
    """Counting pulled in tiktoken, which downloads its tables."""
    code = (
        "import sys; sys.modules['tiktoken'] = None\n"
        "from kvcomm_integrations.autogen import KVCommChatCompletionClient as C\n"
        "heavy = [m for m in ('torch', 'vllm', 'transformers', 'autogen_agentchat') if m in sys.modules]\n"
        "C(model='x').model_info\nassert not heavy, heavy"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)


@pytest.mark.parametrize("family", ["r1", "unknown"])
async def test_a_thinking_model_that_calls_tools_has_a_thought(make_thinking, family):
    """With the family "r1" and tools the thought was lost, and thinking was only cut out for that family."""
    answer = 'I need the weather.</think>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    client = make_thinking([answer, answer, "Now I know.</think>It is sunny."], model_info={"family": family})
    tool = FunctionTool(lambda: "sunny", description="The weather.", name="f")
    result = await client.create(QUESTION, tools=[tool])
    assert (result.content[0].name, result.thought) == ("f", "I need the weather.")
    agent = AssistantAgent("a", model_client=client, tools=[tool], reflect_on_tool_use=True)
    messages = (await agent.run(task="How is the weather?")).messages
    thoughts = [m.content for m in messages if type(m).__name__ == "ThoughtEvent"]
    assert thoughts == ["I need the weather.", "Now I know."]
    assert messages[-1].content == "It is sunny."


async def test_a_stream_has_its_usage_without_asking(make):
    """create_stream reported zero tokens unless an extra argument was given."""
    client = make("one two three")
    plain = await client.create(QUESTION)
    streamed = [item async for item in client.create_stream(QUESTION)][-1]
    assert streamed.usage == plain.usage and streamed.usage.prompt_tokens > 0 < streamed.usage.completion_tokens
    agent = AssistantAgent("a", model_client=client, model_client_stream=True)
    usage = (await agent.run(task="How is the weather?")).messages[-1].models_usage
    assert usage.prompt_tokens > 0 < usage.completion_tokens
    assert client.total_usage().completion_tokens == 3 * plain.usage.completion_tokens


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "mistake",
    [
        "",
        "I think somebody else should answer.",
        "either planner or writer",
        "PLANNER",
        '<tool_call>\n{"name": "planner", "arguments": {}}\n</tool_call>',
        "<think>planner or writer?</think>",
        "**planner**\n\nbecause",
    ],
)
async def test_a_selector_gets_over_a_small_models_mistakes(make, mistake, streaming):
    """SelectorGroupChat raised when a small model's answer named no agent, or two, or was no text."""
    client = make(lambda request: mistake if "Manager" in request.params.agent else "An answer of some words.")
    team = SelectorGroupChat(
        [
            AssistantAgent(name, model_client=client, description=name, system_message=f"You are {name}.")
            for name in ("planner", "writer", "critic")
        ],
        model_client=client,
        max_turns=2,
        model_client_streaming=streaming,
    )
    result = await team.run(task="How is the weather?")
    assert [message.source for message in result.messages][:1] == ["user"]
    assert len(result.messages) == 3
    assert {"planner", "writer", "critic"} & set(agents(client))


async def test_contexts_that_drop_messages(make):
    """A buffered context may start with a function result or an assistant's message; the model still answers."""
    client = make("ok")
    agent = AssistantAgent("a", model_client=client, model_context=BufferedChatCompletionContext(buffer_size=2))
    for _ in range(4):
        assert (await agent.run(task="And now?")).messages[-1].content == "ok"
