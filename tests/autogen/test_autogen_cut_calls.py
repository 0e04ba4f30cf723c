"""A call that was cut off is never run: AutoGen has no invalid calls, so it stays visible as text."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from ag_helpers import CHATML, byte_tokenizer, fake
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import CreateResult, UserMessage
from autogen_core.tools import FunctionTool

from kvcomm_integrations.autogen import KVCommChatCompletionClient
from kvcomm_integrations.engines.fake import FakeEngine

PATH = "home/projects/2023/old-files/report-12"
RAN: list[str] = []
QUESTION = [UserMessage(content="Delete the reports.", source="user")]


def delete_files(path: str) -> str:
    """Delete a folder."""
    RAN.append(path)
    return f"deleted {path}"


def list_files(path: str) -> str:
    """List a folder."""
    RAN.append(path)
    return "nothing"


TOOLS = [FunctionTool(function, description="d") for function in (delete_files, list_files)]
ARGUMENTS = f'{{"path": "{PATH}"}}'
FORMATS = {
    "hermes": f'<tool_call>\n{{"name": "delete_files", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3_json": f'{{"name": "delete_files", "parameters": {ARGUMENTS}}}',
    "mistral": f"[TOOL_CALLS]delete_files[ARGS]{ARGUMENTS}",
}
WHOLE = '<tool_call>\n{"name": "list_files", "arguments": {"path": "."}}\n</tool_call>\n'
TOKENIZER = byte_tokenizer(CHATML, ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"))


def client(name, text, until, *, delta_tokens=2, then=()):
    """A client whose answer is cut off after the first ``until`` in it."""
    RAN.clear()
    settings = {}
    if name != "hermes":
        if find_spec("vllm") is None:
            pytest.skip("these calls are read by vLLM's parsers")
        settings["tool_parser"] = name
    limit = len(TOKENIZER.encode(text[: text.find(until) + len(until)], allow_special=True))
    engine = FakeEngine(TOKENIZER, [text, *then] if then else text, delta_tokens=delta_tokens)
    return KVCommChatCompletionClient(model="fake", engine=engine, max_tokens=limit, **settings)


async def both(client):
    """The result of a call, and the strings and the result of the same call streamed."""
    result = await client.create(QUESTION, tools=TOOLS)
    items = [item async for item in client.create_stream(QUESTION, tools=TOOLS)]
    assert isinstance(items[-1], CreateResult)
    return result, items[:-1], items[-1]


@pytest.mark.parametrize("delta_tokens", [1, 3, 1000])
@pytest.mark.parametrize("until", ["delete_f", "delete_files", "old-f", PATH, PATH + '"', ARGUMENTS])
@pytest.mark.parametrize("name", sorted(FORMATS))
async def test_a_call_cut_off_by_the_limit_is_text(name, until, delta_tokens):
    if name == "mistral" and until == ARGUMENTS:
        pytest.skip("the call ends there")
    created, strings, streamed = await both(client(name, FORMATS[name], until, delta_tokens=delta_tokens))
    assert "".join(strings) == streamed.content
    for result in (created, streamed):
        assert isinstance(result.content, str) and result.finish_reason == "length"
        assert until[-5:] in result.content
        if until == "old-f" and delta_tokens < 1000:
            assert "delete_files was not called" in result.content and "raise max_tokens=" in result.content


async def test_a_whole_call_before_the_cut_one_stays_a_call():
    text = "I look.\n" + WHOLE + FORMATS["hermes"]
    created, _, streamed = await both(client("hermes", text, "old-f"))
    for result in (created, streamed):
        (call,) = result.content
        assert (call.name, call.arguments) == ("list_files", '{"path": "."}')
        assert result.finish_reason == "length"
        assert result.thought.startswith("I look.\n\n[delete_files was not called: ") and "old-f" in result.thought


async def test_a_call_that_ends_at_the_limit_is_a_call():
    created, _, streamed = await both(client("hermes", FORMATS["hermes"], FORMATS["hermes"]))
    for result in (created, streamed):
        assert result.content[0].arguments == ARGUMENTS and result.thought is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", sorted(FORMATS))
async def test_an_agent_does_not_run_a_call_that_was_cut_off(name, stream):
    agent = AssistantAgent(
        "a", model_client=client(name, FORMATS[name], "old-f"), tools=TOOLS, model_client_stream=stream
    )
    result = await agent.run(task="Delete the reports.")
    assert RAN == []
    assert [type(message).__name__ for message in result.messages] == ["TextMessage", "TextMessage"]
    assert "old-f" in result.messages[-1].content and "raise max_tokens=" in result.messages[-1].content


async def test_an_agent_runs_the_whole_call_only():
    chat = client("hermes", WHOLE + FORMATS["hermes"], "old-f", then=["Done."])
    agent = AssistantAgent("a", model_client=chat, tools=TOOLS, reflect_on_tool_use=True)
    result = await agent.run(task="Delete the reports.")
    assert RAN == ["."] and result.messages[-1].content == "Done."
    assert "old-f" in fake(chat).requests[1].prompt.text
