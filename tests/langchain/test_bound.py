"""What is bound to a model survives every way LangChain has of wrapping it: a lost tenant would be a leak."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.load import dumpd
from langchain_core.runnables import ConfigurableField, RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from lc_helpers import fake
from pydantic import BaseModel

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.langchain import ChatKVComm

BOUND = {"agent": "critic", "session": "ticket", "tenant": "acme", "mode": "dense"}


class Answer(BaseModel):
    """An answer."""

    value: int


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def calls(step: Any) -> Any:
    return step.bind_tools([add])


def structured(step: Any) -> Any:
    return step.with_structured_output(Answer, include_raw=True)


WRAPS: dict[str, Any] = {
    "bind": lambda m: m.bind(temperature=0.5),
    "caller again": lambda m: m.bind(kvcomm={"agent": "critic"}),
    "nothing": lambda m: m.bind(kvcomm=None),
    "config": lambda m: m.with_config(tags=["x"]),
    "retry": lambda m: m.with_retry(stop_after_attempt=2),
    "fallbacks": lambda m: m.with_fallbacks([m.bind(temperature=1)]),
    "fields": lambda m: m.configurable_fields(temperature=ConfigurableField("temperature")),
    "alternatives": lambda m: m.configurable_alternatives(ConfigurableField("which"), other=m),
    "listeners": lambda m: m.with_listeners(on_start=lambda run: None),
    "types": lambda m: m.with_types(output_type=object),
    "tools": calls,
}


def asked(model: ChatKVComm) -> dict[str, str]:
    params = fake(model).requests[-1].params
    return {"agent": params.agent, "session": params.session, "tenant": params.tenant, "mode": params.mode.value}


@pytest.mark.parametrize("last", [lambda m: m, calls, structured], ids=["plain", "tools", "structured"])
@pytest.mark.parametrize("after", WRAPS)
@pytest.mark.parametrize("before", WRAPS)
def test_who_asks_survives_any_chain(make_tools, before, after, last):
    if (before, after) == ("fallbacks", "fields"):
        pytest.skip("LangChain does not do that: which of the models' fields would they be?")
    model = make_tools("ok")
    chain = last(WRAPS[after](WRAPS[before](model).bind(kvcomm=BOUND)))
    chain.invoke("q")
    assert asked(model) == BOUND


@pytest.mark.parametrize("last", [calls, structured])
@pytest.mark.parametrize("wrap", WRAPS)
def test_sampling_survives_tools_and_schemas(make_tools, wrap, last):
    model = make_tools("ok")
    last(WRAPS[wrap](model.bind(seed=7, logit_bias={1: 2.0}))).invoke("q")
    sampling = fake(model).requests[-1].sampling
    assert sampling.seed == 7 and sampling.logit_bias == {1: 2.0}


async def test_every_way_of_calling(make_tools):
    model = make_tools("ok")
    chain = calls(model.bind(kvcomm=BOUND).with_retry())
    list(chain.stream("q"))
    await chain.ainvoke("q")
    _ = [chunk async for chunk in chain.astream("q")]
    chain.batch(["q"])
    await chain.abatch(["q"])
    assert len(fake(model).requests) == 5
    assert {request.params.tenant for request in fake(model).requests} == {"acme"}


def test_a_call_changes_what_it_names_and_leaves_the_rest(make):
    model = make("ok")
    bound = model.bind(kvcomm=BOUND)
    bound.invoke("q", kvcomm={"agent": "other"})
    assert asked(model) == {**BOUND, "agent": "other"}
    bound.bind(kvcomm={"session": "next", "tenant": None}).invoke("q")
    assert asked(model) == {**BOUND, "session": "next"}
    model.invoke("q")
    assert asked(model) == {"agent": "default", "session": asked(model)["session"], "tenant": "default", "mode": "auto"}


def test_mode_and_policy_by_themselves(make_tools):
    model = make_tools("ok")
    calls(model.bind(mode="dense", policy="aligned")).invoke("q")
    assert asked(model)["mode"] == "dense" and fake(model).requests[-1].params.policy == "aligned"


def test_the_latest_of_two_binds_wins(make_tools):
    model = make_tools("ok")
    chain = model.bind(tool_choice="none", seed=1).with_fallbacks([model]).bind_tools([add], tool_choice="any")
    chain.bind(seed=2).invoke("q")
    assert fake(model).requests[-1].sampling.seed == 2
    assert fake(model).requests[-1].sampling.structured_output is not None


def test_fields_set_by_a_config_reach_a_model_with_tools(make_tools):
    model = make_tools("ok")
    chain = calls(model.configurable_fields(seed=ConfigurableField("seed")))
    chain.invoke("q", config=RunnableConfig(configurable={"seed": 5}))
    assert fake(model).requests[-1].sampling.seed == 5
    assert "add" in fake(model).tokenizer.decode(fake(model).requests[-1].prompt.token_ids)


def test_one_object_knows_the_last_report_of_all_that_was_bound_to_it(make):
    model = make("ok")
    model.bind(kvcomm=BOUND).invoke("q")
    assert model.last_report.agent == "critic"
    assert model.with_retry().last_report is model.last_report


def test_bound_values_are_checked_where_they_are_bound(make):
    with pytest.raises(ConfigurationError, match="agnet is unknown; known are agent"):
        make("ok").bind(kvcomm={"agnet": "critic"})
    with pytest.raises(ConfigurationError, match="mode"):
        make("ok").bind(kvcomm={"mode": "fast"})


def test_an_agent_that_unwraps_the_model_keeps_the_tenant(make_tools):
    """LangGraph's own agent takes the bound model out of its binding before it asks for structured output."""
    model = make_tools(["done", '{"value": 4}'])
    agent = create_react_agent(model.bind(kvcomm={"tenant": "acme"}), [add], response_format=Answer)
    assert agent.invoke({"messages": [("user", "2 + 2?")]})["structured_response"] == Answer(value=4)
    assert [request.params.tenant for request in fake(model).requests] == ["acme", "acme"]


def test_in_a_graph(make_tools):
    model = make_tools("ok")
    chain = calls(model.bind(kvcomm={"tenant": "acme"}))
    graph = StateGraph(MessagesState)
    graph.add_node("writer", lambda state: {"messages": [chain.invoke(state["messages"])]})
    graph.add_edge(START, "writer")
    graph.compile().invoke({"messages": [("user", "q")]})
    assert asked(model)["agent"] == "writer" and asked(model)["tenant"] == "acme"


def test_what_is_bound_is_written_as_langchains_own_binding(make):
    written = dumpd(make("ok").bind(kvcomm={"tenant": "acme"}, seed=3))
    assert written["id"][-1] == "RunnableBinding"
    assert written["kwargs"]["bound"]["kwargs"]["tenant"] == "acme" and written["kwargs"]["kwargs"] == {"seed": 3}
