"""A call that was cut off is never run, on any path, and can be seen with the reason."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage, message_chunk_to_message
from langchain_core.tools import tool
from langchain_core.utils.json import parse_partial_json
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from lc_helpers import TOOL_CHATML, byte_tokenizer, fake
from pydantic import BaseModel

from kvcomm_integrations.chat.chunks import InvalidCallChunk
from kvcomm_integrations.engines.fake import FakeEngine
from kvcomm_integrations.langchain import ChatKVComm
from kvcomm_integrations.langchain.calls import spoiling

PATH = "home/projects/2023/old-files/report-12"
RAN: list[str] = []


@tool
def delete_files(path: str) -> str:
    """Delete a folder."""
    RAN.append(path)
    return f"deleted {path}"


@tool
def list_files(path: str) -> str:
    """List a folder."""
    RAN.append(path)
    return "nothing"


TOOLS = [delete_files, list_files]
NAME, ARGUMENTS = "delete_files", f'{{"path": "{PATH}"}}'
FORMATS = {
    "hermes": f'<tool_call>\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3_json": f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}',
    "mistral": f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}",
    "glm45": f"<tool_call>{NAME}\n<arg_key>path</arg_key>\n<arg_value>{PATH}</arg_value>\n</tool_call>",
}
LIST = {"hermes": '<tool_call>\n{"name": "list_files", "arguments": {"path": "."}}\n</tool_call>'}
MARKS = ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>")
MARKS += ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
BYTES, TOKENS = byte_tokenizer(TOOL_CHATML), byte_tokenizer(TOOL_CHATML, MARKS)


def model(name, text, until, *, delta_tokens=2, then=(), **fields):
    """A model whose first answer is cut off after the first ``until`` in it; ``then`` it gives these."""
    if name != "hermes":
        fields["tool_parser"] = name
        if find_spec("vllm") is None:
            pytest.skip("these calls are read by vLLM's parsers")
    tokenizer = BYTES if name == "hermes" else TOKENS
    limit = len(tokenizer.encode(text[: text.find(until) + len(until)], allow_special=True))
    script = [text, *then] if then else text
    engine = FakeEngine(tokenizer, script, delta_tokens=delta_tokens)
    RAN.clear()
    return ChatKVComm(model="fake", engine=engine, max_tokens=limit, **fields)


def total(chunks):
    result = chunks[0]
    for chunk in chunks[1:]:
        result += chunk
    return result


async def invoke(model):
    return model.bind_tools(TOOLS).invoke("q")


async def ainvoke(model):
    return await model.bind_tools(TOOLS).ainvoke("q")


async def streaming(model):
    return model.model_copy(update={"streaming": True}).bind_tools(TOOLS).invoke("q")


async def astreaming(model):
    return await model.model_copy(update={"streaming": True}).bind_tools(TOOLS).ainvoke("q")


async def stream(model):
    return total(list(model.bind_tools(TOOLS).stream("q")))


async def stream_summed_at_once(model):
    first, *rest = model.bind_tools(TOOLS).stream("q")
    return first + rest


async def astream(model):
    return total([chunk async for chunk in model.bind_tools(TOOLS).astream("q")])


async def as_message(model):
    return message_chunk_to_message(await stream(model))


async def events(model):
    seen = [event async for event in model.bind_tools(TOOLS).astream_events("q", version="v2")]
    return next(e["data"]["output"] for e in seen if e["event"] == "on_chat_model_end")


async def events_summed(model):
    seen = [event async for event in model.bind_tools(TOOLS).astream_events("q", version="v2")]
    return total([e["data"]["chunk"] for e in seen if e["event"] == "on_chat_model_stream"])


async def protocol(model):
    run = model.bind_tools(TOOLS).stream_events("q", version="v3")
    list(run)
    return run.output


WAYS = [
    invoke, ainvoke, streaming, astreaming, stream, stream_summed_at_once, astream, as_message, events, events_summed,
    protocol,
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_call_cut_off_in_its_arguments_is_invalid_and_visible(way, name):
    message = await way(model(name, FORMATS[name], "old-f"))
    assert message.tool_calls == []
    (invalid,) = message.invalid_tool_calls
    assert invalid["name"] == NAME and "old-f" in invalid["args"]
    told = f"{invalid['error']} {invalid['args']}"
    assert "'length'" in told and "raise max_tokens=" in told
    if way in (invoke, ainvoke, streaming, astreaming):
        assert "raise max_tokens=" in invalid["error"]
        assert invalid["args"].endswith("old-f")
    assert "raise max_tokens=" in message.response_metadata["kvcomm"]["invalid_calls"][0]["error"]
    assert message.response_metadata["finish_reason"] == "length"


def cuts():
    for name, text in FORMATS.items():
        yield pytest.param(name, text, "delete_f", id=f"{name} in the name")
        yield pytest.param(name, text, "delete_files", id=f"{name} after the name")
        yield pytest.param(name, text, text[: text.find("path") + 4], id=f"{name} in a key")
        yield pytest.param(name, text, text[: text.find(PATH)], id=f"{name} before the value")
        yield pytest.param(name, text, PATH, id=f"{name} at the end of the value")
    for name in ("hermes", "llama3_json"):
        yield pytest.param(name, FORMATS[name], ARGUMENTS, id=f"{name} after the arguments")
    text = FORMATS["hermes"]
    yield pytest.param("hermes", text, ARGUMENTS + "}", id="hermes after the object")
    yield pytest.param("hermes", text, text[:-1], id="hermes in the closing tag")


@pytest.mark.parametrize("delta_tokens", [1, 1000])
@pytest.mark.parametrize(("name", "text", "until"), list(cuts()))
async def test_wherever_the_limit_falls_the_call_is_no_call(name, text, until, delta_tokens):
    for way in (invoke, stream, events, protocol):
        message = await way(model(name, text, until, delta_tokens=delta_tokens))
        assert message.tool_calls == []
        assert message.invalid_tool_calls or message.text.strip(), "nothing of it is to be seen"
        assert message.response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_whole_call_before_the_cut_one_stays_a_call(way):
    text = LIST["hermes"] + "\n" + FORMATS["hermes"]
    message = await way(model("hermes", text, "old-f"))
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("list_files", {"path": "."})]
    assert [call["name"] for call in message.invalid_tool_calls] == [NAME]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_call_that_ends_at_the_limit_is_run(way):
    message = await way(model("hermes", FORMATS["hermes"], FORMATS["hermes"]))
    assert [call["args"] for call in message.tool_calls] == [{"path": PATH}] and message.invalid_tool_calls == []
    assert "invalid_calls" not in message.response_metadata["kvcomm"]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_arguments_that_the_model_did_not_close_are_not_closed_for_it(way):
    text = '<tool_call>\n{"name": "delete_files", "arguments": {"path": "home/</tool_call>'
    message = await way(model("hermes", text + " " * 9, text + " "))
    assert message.tool_calls == [] and message.invalid_tool_calls[0]["name"] == NAME


@pytest.mark.parametrize("way", [invoke, streaming, stream, events], ids=lambda way: way.__name__)
async def test_with_standard_content_blocks(way):
    message = await way(model("hermes", FORMATS["hermes"], "old-f", output_version="v1"))
    assert message.tool_calls == [] and "old-f" in message.invalid_tool_calls[0]["args"]
    assert "tool_call" not in [block["type"] for block in message.content_blocks]


def graph(model):
    """A model and a tool node, by hand."""
    bound = model.bind_tools(TOOLS, tool_choice="any")

    def call(state):
        return {"messages": [bound.invoke(state["messages"])]}

    def route(state):
        return "tools" if state["messages"][-1].tool_calls else END

    builder = StateGraph(MessagesState)
    builder.add_node("model", call)
    builder.add_node("tools", ToolNode(TOOLS))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", route, ["tools", END])
    builder.add_edge("tools", END)
    return builder.compile()


APPS = {"by hand": graph, "create_agent": lambda model: create_agent(model, TOOLS)}
QUESTION = {"messages": [HumanMessage("Delete the reports.")]}


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("app", sorted(APPS))
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_is_not_run_with_arguments_that_were_cut_off(app, name, streamed):
    make = lambda: APPS[app](model(name, FORMATS[name], "old-f", streaming=streamed))  # noqa: E731
    states = [make().invoke(QUESTION), await make().ainvoke(QUESTION)]
    for mode in ("messages", ["updates", "messages"]):
        list(make().stream(QUESTION, stream_mode=mode))
        assert RAN == []
        [_ async for _ in make().astream(QUESTION, stream_mode=mode)]
        assert RAN == []
    states.append(list(make().stream(QUESTION, stream_mode=["values", "messages"]))[-1][1])
    seen = [event async for event in make().astream_events(QUESTION, version="v2")]
    assert not [event for event in seen if event["event"].startswith("on_tool")]
    states.append(seen[-1]["data"]["output"])
    assert RAN == []
    for state in states:
        last = state["messages"][-1]
        assert not [m for m in state["messages"] if isinstance(m, ToolMessage)]
        assert "raise max_tokens=" in last.invalid_tool_calls[0]["error"]


def test_the_whole_call_is_run_and_the_cut_one_shown_to_the_model():
    text = LIST["hermes"] + "\n" + FORMATS["hermes"]
    chat = model("hermes", text, "old-f", then=["Done."])
    list(create_agent(chat, TOOLS).stream(QUESTION, stream_mode="messages"))
    assert RAN == ["."]
    assert "old-f" in fake(chat).requests[1].prompt.text


class Folder(BaseModel):
    """A folder."""

    path: str


async def test_a_structured_output_by_call_is_not_made_of_a_cut_call():
    text = FORMATS["hermes"].replace(NAME, "Folder")
    structured = model("hermes", text, "old-f").with_structured_output(Folder, method="function_calling")
    assert structured.invoke("q") is None
    assert not [item for item in structured.stream("q") if item and item.path == PATH]
    raw = (
        model("hermes", text, "old-f")
        .with_structured_output(
            Folder,
            method="function_calling",
            include_raw=True,
        )
        .invoke("q")
    )
    assert raw["parsed"] is None and "max_tokens" in raw["raw"].invalid_tool_calls[0]["error"]


@settings(max_examples=300, deadline=None)
@given(
    st.text('{}[]"\\:,a1 \n', max_size=40)
    | st.recursive(
        st.integers() | st.text('a"\\{', max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a", max_size=2), inner, max_size=3),
    ).map(lambda value: json.dumps({"a": value})),
    st.integers(0, 40),
)
def test_spoilt_arguments_are_an_object_to_nobody(text, size):
    cut = text[:size]
    spoilt = cut + spoiling(InvalidCallChunk(0, "id", "f", cut, cut, "why", True))
    try:
        read = parse_partial_json(spoilt)
    except ValueError:
        read = None
    assert not isinstance(read, dict)
    chunk = AIMessageChunk("", tool_call_chunks=[{"name": "f", "args": spoilt, "id": "id", "index": 0}])
    assert chunk.tool_calls == [] and "why" in chunk.invalid_tool_calls[0]["args"]
