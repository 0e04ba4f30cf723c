"""LangGraph applications on the real engine: what is loaded for whom, and what happens when a node fails."""

from __future__ import annotations

import operator
import time
import uuid
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph

from kvcomm_integrations.bench.roles import ROLES
from kvcomm_integrations.demo.graph import team
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.langchain import ChatKVComm
from kvcomm_integrations.wire import RequestReport, SegmentKind
from tests.engine.helpers import QUESTIONS

pytestmark = [pytest.mark.engine, pytest.mark.served]

QUESTION = " ".join(QUESTIONS)


@pytest.fixture
def model(engine: InProcessEngine) -> ChatKVComm:
    return ChatKVComm(model=engine.config.model, engine=engine, temperature=0, max_tokens=72)


def _thread() -> dict[str, Any]:
    return {"configurable": {"thread_id": uuid.uuid4().hex}}


def _report(model: ChatKVComm, message: AIMessage) -> RequestReport:
    number = message.response_metadata["kvcomm"]["request"]
    return next(record for record in model.report().records if record.number == number)


def test_every_shared_content_is_loaded_from_the_second_agent_on(model: ChatKVComm) -> None:
    agents = list(ROLES)[:4]
    state = team(model, agents).invoke({"messages": [("user", QUESTION)]}, _thread())
    answers = state["messages"][1:]
    assert [a.name for a in answers] == agents
    first, *others = [_report(model, answer) for answer in answers]
    assert first.loaded == 0
    for number, report in enumerate(others, 1):
        placeholders = [s for s in report.segments if s.kind is SegmentKind.PLACEHOLDER]
        assert len(placeholders) == number + 1
        assert all(s.loaded > 0 for s in placeholders), report
        usage = answers[number].usage_metadata["input_token_details"]
        assert usage == {"cache_read": report.exact + report.carried + report.loaded}


async def test_parallel_branches_share_one_prefill(model: ChatKVComm) -> None:
    class State(TypedDict):
        answers: Annotated[list[AIMessage], operator.add]

    def branch(name: str) -> Any:
        async def speak(state: State) -> State:
            answer = await model.ainvoke([SystemMessage(ROLES[name]), HumanMessage(QUESTION)])
            return {"answers": [answer]}

        return speak

    graph = StateGraph(State)
    for name in list(ROLES)[:4]:
        graph.add_node(name, branch(name))
        graph.add_edge(START, name)
        graph.add_edge(name, END)
    state = await graph.compile().ainvoke({"answers": []}, _thread())
    loaded = sorted(_report(model, a).loaded for a in state["answers"])
    assert loaded[0] == 0
    assert all(n > 0 for n in loaded[1:])


def test_a_history_behind_another_system_prompt_is_loaded_as_one_run(model: ChatKVComm) -> None:
    session = uuid.uuid4().hex
    history: list[AnyMessage] = []
    for question in QUESTIONS[:2]:
        history.append(HumanMessage(question))
        speaker = model.bind(max_tokens=16, kvcomm={"agent": "solver", "session": session})
        history.append(speaker.invoke([SystemMessage(ROLES["solver"]), *history]))
    reader = model.bind(max_tokens=4, kvcomm={"agent": "critic", "session": session})
    report = _report(model, reader.invoke([SystemMessage(ROLES["critic"]), *history, HumanMessage(QUESTIONS[2])]))
    names = [part.name for part in report.segments]
    run = report.segments[1 : names.index("agent:solver:response#2") + 1]
    assert [part.kind for part in run] == [SegmentKind.PLACEHOLDER, SegmentKind.FIXED] * 3 + [SegmentKind.PLACEHOLDER]
    assert {part.source for part in run} == {"solver"}
    first, *rest = run
    assert first.repaired == 32
    assert all(part.loaded + part.repaired == part.end - part.start for part in rest[:-1])
    assert sum(part.repaired for part in rest) <= 1  # the first answer's last token, if it was cut off, has no KV


def test_an_exception_in_a_node_leaves_nothing_behind(model: ChatKVComm, engine: InProcessEngine) -> None:
    class State(TypedDict):
        text: str

    def fails(state: State) -> State:
        for _ in model.stream([HumanMessage(QUESTION)]):
            raise RuntimeError("a bug in the application")
        return state

    graph = StateGraph(State)
    graph.add_node("fails", fails)
    graph.add_edge(START, "fails")
    with pytest.raises(RuntimeError, match="a bug in the application"):
        graph.compile().invoke({"text": ""}, _thread())
    deadline = time.monotonic() + 20
    while engine.scheduler_snapshot.usage > 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert engine.scheduler_snapshot.usage == 0
    assert model.invoke([HumanMessage("Say hello.")]).text


async def test_all_ways_of_calling_give_the_same_answer(model: ChatKVComm) -> None:
    short = model.bind(max_tokens=12)
    messages = [SystemMessage(ROLES["writer"]), HumanMessage("Name three colours of the rainbow.")]
    invoked = short.invoke(messages).text
    streamed = list(short.stream(messages))
    assert "".join(c.text for c in streamed) == invoked
    assert (await short.ainvoke(messages)).text == invoked
    whole: AIMessageChunk | None = None
    async for chunk in short.astream(messages):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.text == invoked
    assert whole.usage_metadata["output_tokens"] <= 12
    assert [m.text for m in short.batch([messages, messages])] == [invoked, invoked]
