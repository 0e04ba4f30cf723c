"""The LangGraph examples, unmodified, on the fake engine: who called, in which session, and what was found for whom."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult
from langgraph.types import Command
from lc_helpers import CHATML, byte_tokenizer, fake, who

from kvcomm_integrations.engines.interface import GenerationRequest
from kvcomm_integrations.langchain import ChatKVComm
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import RequestReport, SegmentKind

EXAMPLES = Path(__file__).parents[2] / "examples"
WAYS = ("invoke", "ainvoke", "stream", "astream")

pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    """One token a byte, whatever model other tests use: here lengths in tokens matter."""
    return byte_tokenizer(CHATML)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Imports an example by the end of its name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield lambda name: importlib.import_module(f"langgraph_{name}")
    for name in [name for name in sys.modules if (EXAMPLES / f"{name}.py").exists()]:
        del sys.modules[name]


@pytest.fixture(params=WAYS)
def run(request: pytest.FixtureRequest):
    """Runs an application to its end: sync or async, streaming messages or not."""

    async def call(app: Any, inputs: Any, config: Any = None) -> None:
        options = {"stream_mode": "messages"} if request.param.endswith("stream") else {}
        result = getattr(app, request.param)(inputs, config, **options)
        if request.param == "stream":
            list(result)
        elif request.param == "astream":
            _ = [chunk async for chunk in result]
        elif request.param == "ainvoke":
            await result

    return call


def answer(request: GenerationRequest) -> str:
    """What an agent says: long enough to be shared, and another text for every request."""
    agent, size = request.params.agent, len(request.prompt.token_ids)
    return f"I am {agent}, I have read {size} tokens, and I conclude that {3 * size} bales of hay should be enough."


def call(name: str, arguments: str = "{}") -> str:
    """An answer that is a tool call."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def calls_first(agent: str, tool: str, arguments: str = "{}") -> Callable[[GenerationRequest], str]:
    """Everybody answers, but the first answer of ``agent`` is a tool call."""
    waiting = [agent]

    def script(request: GenerationRequest) -> str:
        if request.params.agent in waiting:
            waiting.remove(agent)
            return call(tool, arguments)
        return answer(request)

    return script


class Reports(BaseCallbackHandler):
    """Finds the report of every answer, as an application would."""

    def __init__(self) -> None:
        self.model: ChatKVComm | None = None
        self.numbers: list[int] = []

    @property
    def all(self) -> list[RequestReport]:
        by_number = {record.number: record for record in self.model.report().records}
        return [by_number[number] for number in self.numbers]

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        message = response.generations[0][0].message  # type: ignore[union-attr]
        self.numbers.append(message.response_metadata["kvcomm"]["request"])


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture(params=["make", "make_tools"])
def make_any(request: pytest.FixtureRequest, reports: Reports):
    """Makes a chat model: one template knows no tools, the other does."""
    make = request.getfixturevalue(request.param)

    def build(script: Any) -> ChatKVComm:
        reports.model = make(script, callbacks=[reports])
        return reports.model

    return build


def found(request: GenerationRequest) -> dict[str, tuple[int, ...]]:
    """Placeholders of a prompt, in order: name to token ids."""
    prompt = request.prompt
    return {s.name: prompt.token_ids[s.start : s.end] for s in prompt.segments if s.kind is SegmentKind.PLACEHOLDER}


def check(model: ChatKVComm, expected: list[tuple[str, str]]) -> dict[str, str]:
    """Compare who called with which contents; return each content's text.

    Args:
        model: what all agents share.
        expected: agent and contents of every request. Contents are written ``name=label``, the names without
            ``agent:`` and ``:response``; what has one label must have the same token ids in every prompt.
    """
    requests = fake(model).requests
    assert [request.params.agent for request in requests] == [agent for agent, _ in expected]
    ids: dict[str, tuple[int, ...]] = {}
    for request, (_, contents) in zip(requests, expected, strict=True):
        wanted = [content.split("=") for content in contents.split()]
        placeholders = found(request)
        short = {name: name.removeprefix("agent:").replace(":response", "") for name in placeholders}
        assert list(short.values()) == [name for name, _ in wanted]
        for (_, label), tokens in zip(wanted, placeholders.values(), strict=True):
            assert ids.setdefault(label, tokens) == tokens
    assert len(set(ids.values())) == len(ids)
    return {label: fake(model).tokenizer.decode(tokens) for label, tokens in ids.items()}


def check_loaded(model: ChatKVComm, reports: Reports) -> None:
    """Whatever an earlier prompt had as a placeholder was not computed again."""
    known: set[tuple[int, ...]] = set()
    for request, report in zip(fake(model).requests, reports.all, strict=True):
        contents = found(request)
        again = [part for part in report.segments if part.name in contents and contents[part.name] in known]
        assert [part.computed for part in again] == [0] * len(again)
        assert all(part.exact or part.source for part in again)
        known |= set(contents.values())
    assert any(report.loaded for report in reports.all)


def one_session(model: ChatKVComm, *, named: str | None = None) -> bool:
    """All requests were of one session: the one named, or one made up for the run."""
    sessions = {session for _, session in who(model)}
    return sessions == {named} if named else len(sessions) == 1 and next(iter(sessions)).startswith("run:")


PATTERNS: dict[str, tuple[Callable[[], Callable[[GenerationRequest], str]], list[tuple[str, str]]]] = {
    "supervisor_team": (
        lambda: calls_first("supervisor", "transfer_to_solver"),
        [
            ("supervisor", "user_question=task"),
            ("solver", "user_question=task supervisor=call tool:transfer_to_solver:result=handed"),
            (
                "supervisor",
                "user_question=task supervisor=call tool:transfer_to_solver:result=handed solver=solved "
                "solver#2=back tool:transfer_back_to_supervisor:result=returned",
            ),
        ],
    ),
    "swarm_team": (
        lambda: calls_first("planner", "transfer_to_solver"),
        [
            ("planner", "user_question=task"),
            ("solver", "user_question=task planner=call tool:transfer_to_solver:result=handed"),
        ],
    ),
    "create_agent": (
        lambda: calls_first("solver", "hay_price", '{"bales": 357}'),
        [
            ("solver", "user_question=task"),
            ("solver", "user_question=task solver=call tool:hay_price:result=price"),
            ("critic", "user_question=task solver=call tool:hay_price:result=price solver#2=solved"),
        ],
    ),
    "subgraphs": (
        lambda: answer,
        [
            ("solving/planner", "user_question=task"),
            ("solving/solver", "user_question=task solving/planner=plan"),
            ("writing/writer", "user_question=task solving/planner=plan solving/solver=solved"),
        ],
    ),
}
PATTERNS["create_react_agent"] = PATTERNS["create_agent"]


@pytest.mark.parametrize("pattern", PATTERNS)
async def test_history_of_messages(load, make_any, run, reports, pattern):
    script, expected = PATTERNS[pattern]
    example, model = load(pattern), make_any(script())
    await run(example.build(model), {"messages": [("user", example.TASK)]})
    texts = check(model, expected)
    assert one_session(model)
    assert texts["task"] == example.TASK
    check_loaded(model, reports)


async def test_debate(load, make_any, run, reports):
    example, model = load("debate"), make_any(answer)
    await run(example.build(model), {"topic": example.TOPIC})
    texts = check(
        model,
        [
            ("favour", "user_question=prompt"),
            ("against", "user_question:part=topic favour=said"),
            ("judge", "user_question:part=topic favour=said against=objected"),
        ],
    )
    assert one_session(model)
    assert texts["topic"] == example.TOPIC and texts["said"].startswith("I am favour")
    judge = reports.all[-1]
    assert {part.source for part in judge.segments if part.name == "user_question:part"} == {"favour"}
    assert judge.loaded > 0


async def test_rag_with_tools(load, make_any, run, reports):
    example, model = load("rag_tools"), make_any(calls_first("researcher", "search_handbook", '{"query": "hay"}'))
    await run(example.build(model), {"messages": [("user", example.QUESTION)]})
    texts = check(
        model,
        [
            ("researcher", "user_question=q"),
            ("researcher", "user_question=q researcher=call tool:search_handbook:result=page"),
            ("editor", "user_question=q researcher=call tool:search_handbook:result=page researcher#2=a"),
        ],
    )
    assert one_session(model)
    assert texts["page"] == example.HANDBOOK
    check_loaded(model, reports)
    assert {part.source for part in reports.all[-1].segments if part.name.startswith("tool:")} == {"researcher"}


async def test_map_reduce(load, make_any, run):
    example, model = load("map_reduce"), make_any(answer)
    await run(example.build(model), {"question": example.QUESTION, "documents": example.DOCUMENTS})
    *readers, editor = fake(model).requests
    assert [request.params.agent for request in (*readers, editor)] == ["reader"] * 3 + ["editor"]
    assert one_session(model)
    decode = fake(model).tokenizer.decode
    assert [list(found(reader)) for reader in readers] == [["user_question", "user_question#2"]] * 3
    assert sorted(decode(found(reader)["user_question#2"]) for reader in readers) == sorted(example.DOCUMENTS)
    notes = ["agent:reader:response", "agent:reader:response#2", "agent:reader:response#3"]
    assert list(found(editor)) == ["user_question", *notes]
    assert all(decode(found(editor)[note]).startswith("I am reader") for note in notes)
    questions = {found(request)["user_question"] for request in (*readers, editor)}
    assert len(questions) == 1 and decode(questions.pop()) == example.QUESTION
    report = model.last_report
    assert report is not None and all(part.loaded for part in report.segments if part.name == "user_question")


async def test_functional(load, make_any, run):
    example, model = load("functional"), make_any(answer)
    await run(example.build(model), example.TASK)
    texts = check(
        model,
        [
            ("panel/estimate", "user_question=task"),
            ("panel/estimate", "user_question=task"),
            ("panel/judge", "user_question=task panel/estimate=one panel/estimate#2=other"),
        ],
    )
    assert one_session(model)
    assert texts["task"] == example.TASK and texts["one"].startswith("I am panel/estimate")


async def test_thread(load, make_any, run, reports):
    example, model = load("thread"), make_any(answer)
    app = example.build(model)
    for question in (example.TASK, example.FOLLOW_UP):
        await run(app, {"messages": [("user", question)]}, {"configurable": {"thread_id": "hay"}})
    texts = check(
        model,
        [
            ("solver", "user_question=task"),
            ("critic", "user_question=task solver=solved"),
            ("solver", "user_question=task solver=solved critic=checked user_question#2=more"),
            ("critic", "user_question=task solver=solved critic=checked user_question#2=more solver#2=again"),
        ],
    )
    assert one_session(model, named="thread:hay")
    assert texts["more"] == example.FOLLOW_UP
    check_loaded(model, reports)
    await run(app, {"messages": [("user", example.TASK)]}, {"configurable": {"thread_id": "other"}})
    assert not any(part.source for part in reports.all[-2].segments)


async def test_human_in_the_loop(load, make_any, run, reports):
    example, model = load("human_in_the_loop"), make_any(answer)
    app, thread = example.build(model), {"configurable": {"thread_id": "hay"}}
    await run(app, {"messages": [("user", example.TASK)]}, thread)
    assert [agent for agent, _ in who(model)] == ["solver"]
    await run(app, Command(resume=example.REMARK), thread)
    texts = check(
        model, [("solver", "user_question=task"), ("writer", "user_question=task solver=draft user_question#2=remark")]
    )
    assert one_session(model, named="thread:hay")
    assert texts["remark"] == example.REMARK
    check_loaded(model, reports)


def test_reuse_is_printed(load, make, capsys):
    common, example = load("common"), load("subgraphs")
    model = make(answer, callbacks=[common.PrintReuse()])
    common.show(example.build(model).invoke({"messages": [("user", example.TASK)]})["messages"])
    lines = capsys.readouterr().out.splitlines()
    assert "[solving/planner: 0 of" in lines[0] and "[writing/writer: " in lines[2]
    assert any(line.startswith("ai: I am writing/writer") for line in lines)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("langgraph_*.py")), ids=lambda path: path.stem)
def test_examples_run_their_main(load, make, monkeypatch, capsys, path):
    example = load(path.stem.removeprefix("langgraph_"))
    if path.stem != "langgraph_common":
        monkeypatch.setattr(example, "chat_model", lambda: make(answer))
        example.main()
        assert "I am " in capsys.readouterr().out
