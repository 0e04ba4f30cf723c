"""What callbacks, event streams, tracing, caching and serialization see of a model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.load import dumpd, dumps, load
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from lc_helpers import CHATML, details, fake, who

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.engines.fake import FakeEngine
from kvcomm_integrations.langchain import ChatKVComm

ANSWER = "Seven words are in this short answer."


class Recorder(BaseCallbackHandler):
    def __init__(self):
        self.started, self.tokens, self.ended, self.errors = [], [], [], []

    def on_chat_model_start(self, serialized, messages, **kwargs):
        self.started.append(kwargs)

    def on_llm_new_token(self, token, **kwargs):
        self.tokens.append(token)

    def on_llm_end(self, response, **kwargs):
        self.ended.append(response)

    def on_llm_error(self, error, **kwargs):
        self.errors.append(error)


def test_callbacks_see_each_token_once(make):
    handler = Recorder()
    model = make(ANSWER, callbacks=[handler])
    list(model.stream("q"))
    assert "".join(handler.tokens) == ANSWER
    handler.tokens.clear()
    model.invoke("q")
    assert handler.tokens == []
    make(ANSWER, streaming=True, callbacks=[handler]).invoke("q")
    assert "".join(handler.tokens) == ANSWER
    assert len(handler.ended) == 3
    usage = handler.ended[0].generations[0][0].message.usage_metadata
    assert usage["output_tokens"] > 0


def test_callbacks_see_errors(make):
    handler = Recorder()
    with pytest.raises(ValueError, match="needs"):
        make(ValueError("needs a key"), callbacks=[handler]).invoke("q")
    assert len(handler.errors) == 1


def test_usage_callback_adds_up(make):
    handler = UsageMetadataCallbackHandler()
    model = make(ANSWER, callbacks=[handler])
    results = [model.invoke("q"), model.invoke("q")]
    usage = handler.usage_metadata["fake"]
    assert usage["output_tokens"] == sum(r.usage_metadata["output_tokens"] for r in results)
    assert usage["input_token_details"]["cache_read"] == sum(details(r)["cache_read"] for r in results)


async def test_astream_events_v2(make):
    events = [event async for event in make(ANSWER).astream_events("q", version="v2")]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "on_chat_model_start" and kinds[-1] == "on_chat_model_end"
    chunks = [event["data"]["chunk"] for event in events if event["event"] == "on_chat_model_stream"]
    assert "".join(chunk.text for chunk in chunks) == ANSWER
    output = events[-1]["data"]["output"]
    assert output.usage_metadata["output_tokens"] > 0 and output.response_metadata["kvcomm"]["segment_id"]


async def test_astream_events_of_invoke_inside_a_graph(make):
    model = make(ANSWER)

    def writer(state):
        return {"messages": [model.invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("writer", writer)
    builder.add_edge(START, "writer")
    builder.add_edge("writer", END)
    events = [e async for e in builder.compile().astream_events({"messages": [HumanMessage("q")]}, version="v2")]
    text = "".join(e["data"]["chunk"].text for e in events if e["event"] == "on_chat_model_stream")
    assert text == ANSWER
    assert [agent for agent, _ in who(model)] == ["writer"]


@pytest.mark.parametrize("how", ["invoke", "stream", "ainvoke", "astream"])
async def test_output_version_v1(make_tools, how):
    text = 'Well,\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    model = make_tools("hmm, let me think.</think>" + text, output_version="v1").bind_tools([tool])
    bound = model.bind(chat_template_kwargs={"enable_thinking": True})
    if how == "invoke":
        result = bound.invoke("q")
    elif how == "ainvoke":
        result = await bound.ainvoke("q")
    else:
        chunks = [c async for c in bound.astream("q")] if how == "astream" else list(bound.stream("q"))
        result = chunks[0]
        for chunk in chunks[1:]:
            result += chunk
    blocks = result.content_blocks
    assert [b["type"] for b in blocks] == ["reasoning", "text", "tool_call"]
    assert blocks[0]["reasoning"] == "hmm, let me think." and blocks[1]["text"] == "Well,"
    assert result.tool_calls[0]["args"] == {"a": 1}
    assert result.response_metadata["kvcomm"]["segment_id"]
    again = bound.invoke([HumanMessage("q"), AIMessage(result.content, tool_calls=result.tool_calls)])
    assert again.tool_calls


def test_stream_events_v3(make):
    stream = make(ANSWER).stream_events("q", version="v3")
    assert "".join(stream.text) == ANSWER
    assert stream.output.usage_metadata["output_tokens"] > 0
    assert stream.output.response_metadata["kvcomm"]["segment_id"]


def test_profile(make, tmp_path):
    assert make(engine={"max_model_len": 4096}).profile["max_input_tokens"] == 4096
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    assert ChatKVComm(model=str(tmp_path)).profile["max_input_tokens"] == 2048
    limited = ChatKVComm(model=str(tmp_path), max_model_len=512, max_tokens=100).profile
    assert (limited["max_input_tokens"], limited["max_output_tokens"]) == (512, 100)
    assert limited["tool_calling"] and not limited["image_inputs"]
    assert ChatKVComm(model="not-there").profile.get("max_input_tokens") is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": CHATML}, True),
        ({"tokenizer_config.json": json.dumps({"chat_template": CHATML})}, True),
        ({"tokenizer_config.json": json.dumps({"chat_template": [{"name": "default", "template": CHATML}]})}, True),
        ({"chat_template.jinja": "{{ '[TOOL_CALLS]' }}"}, False),
        ({"chat_template.jinja": "{{ '<|channel|><|message|>' }}"}, False),
        ({"tokenizer_config.json": "no json"}, False),
        ({}, False),
    ],
)
def test_the_profile_promises_tools_beside_a_response_format_only_where_both_can_come(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert ChatKVComm(model=str(tmp_path)).profile["structured_output"] is expected


def test_a_named_parser_decides_over_the_template(make_tools):
    assert make_tools().profile["structured_output"] is True
    assert make_tools(tool_parser="mistral").profile["structured_output"] is False


def test_ls_params():
    model = ChatKVComm(model="m", temperature=0.3, max_tokens=9, stop=["END"])
    params = model._get_ls_params()
    assert params["ls_provider"] == "kvcomm" and params["ls_model_name"] == "m" and params["ls_model_type"] == "chat"
    assert (params["ls_temperature"], params["ls_max_tokens"], params["ls_stop"]) == (0.3, 9, ["END"])
    assert model._get_ls_params(stop=["X"], temperature=1.0, model="other")["ls_model_name"] == "other"
    assert model._get_ls_params(stop=["X"], temperature=1.0)["ls_stop"] == ["X"]


def test_token_counts_are_the_models_own(make):
    model = make()
    tokenizer = model.engine.tokenizer
    assert model.get_token_ids("Zoë counts") == tokenizer.encode("Zoë counts", allow_special=False)
    assert model.get_num_tokens("Zoë counts") == tokenizer.count("Zoë counts")
    messages = [SystemMessage("brief"), HumanMessage("How many?")]
    model.invoke(messages)
    assert model.get_num_tokens_from_messages(messages) == len(fake(model).requests[0].prompt.token_ids)
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    model.bind_tools([tool]).invoke(messages)
    counted = model.get_num_tokens_from_messages(messages, tools=[tool])
    assert counted == len(fake(model).requests[1].prompt.token_ids)


def test_a_cache_hit_never_reaches_the_engine_and_every_setting_is_part_of_the_key(make):
    cache = InMemoryCache()
    model = make([ANSWER, "other", "third", "fourth", "fifth"], cache=cache)
    assert model.invoke("q").content == model.invoke("q").content == ANSWER
    assert len(fake(model).requests) == 1
    assert model.invoke("q", config={"configurable": {"thread_id": "t"}}).content == ANSWER
    assert model.invoke("q", kvcomm={"agent": "a", "session": "s"}).content == ANSWER
    assert model.invoke("q", temperature=0.1).content == "other"
    assert model.invoke("q", kvcomm={"tenant": "t"}).content == "third"
    for change in ({"seed": 7}, {"top_p": 0.5}, {"stop": ["x"]}, {"reuse": ReuseConfig(policy="kvcomm")}):
        other = model.model_copy(update=change)
        assert other._get_llm_string() != model._get_llm_string()
        assert other._identifying_params != model._identifying_params


@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
def test_serialization_keeps_everything_but_the_engine_and_the_key(make, monkeypatch):
    monkeypatch.setenv("KVCOMM_API_KEY", "from-env")
    model = make(
        temperature=0.5, stop=["x"], reuse={"policy": "kvcomm", "isolation": "tenant"}, mode="observe", agent="a",
        tokenization="canonical", chat_template_kwargs={"enable_thinking": False}, api_key="secret-value",
    )  # fmt: skip
    written = dumps(model)
    assert "secret-value" not in written and "from-env" not in written
    again = load(
        json.loads(written), allowed_objects=[ChatKVComm], valid_namespaces=["kvcomm_integrations"],
        secrets_from_env=True,
    )  # fmt: skip
    assert again.engine is None and again.api_key.get_secret_value() == "from-env"
    same_key = {"api_key": model.engine_config.api_key}
    assert again.engine_config.model_copy(update=same_key) == model.engine_config
    assert again._identifying_params == model._identifying_params
    assert dumpd(again) == dumpd(model)


def test_reuse_may_be_a_dict_and_is_checked():
    assert ChatKVComm(model="m", reuse={"policy": "kvcomm"}).reuse.policy == "kvcomm"
    with pytest.raises(ValueError, match="polcy"):
        ChatKVComm(model="m", reuse={"polcy": "kvcomm"})


def test_equal_settings_share_an_engine_and_what_has_been_said():
    one, same = ChatKVComm(model="m", temperature=0), ChatKVComm(model="m", temperature=1, agent="x")
    other = ChatKVComm(model="m", max_model_len=128)
    assert one.runtime is same.runtime
    assert one.runtime is not other.runtime


def test_two_models_on_one_engine_share_contents(tokenizer):
    engine = FakeEngine(tokenizer, ANSWER + " And this is the reason why that is so.")
    one = ChatKVComm(model="fake", engine=engine, agent="one", session="s")
    two = ChatKVComm(model="fake", engine=engine, agent="two", session="s")
    answer = one.invoke("q").model_copy(update={"name": "one"})
    two.invoke([SystemMessage("judge"), answer])
    assert "agent:one:response" in [segment.name for segment in engine.requests[-1].prompt.segments]


def test_importing_and_constructing_loads_neither_torch_nor_vllm():
    code = (
        "import sys; from kvcomm_integrations.langchain import ChatKVComm; ChatKVComm(model='m'); "
        "print([m for m in ('torch', 'vllm', 'transformers', 'langgraph') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_given_profile_stays(make):
    assert make("ok", profile={"max_input_tokens": 7}).profile == {"max_input_tokens": 7}
    with pytest.warns(UserWarning, match="nonsense"):
        make("ok", profile={"nonsense": 7})


async def test_a_profile_asked_for_on_a_loop(make, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    assert ChatKVComm(model=str(tmp_path)).profile["max_input_tokens"] == 2048
    assert make().profile["structured_output"] is True
