"""Every LangGraph example, unmodified, on the real engine: what is loaded for whom, in sync, async and streaming.

A model of this size calls no tools by itself and does not follow instructions, so its tool calls are forced, with given
arguments, and its answers are given too. What is said does not matter here; where its KV comes from does. The
ways of running one application go on at the same time, each in a session of its own.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk
from langgraph.types import Command
from pydantic import PrivateAttr

from kvcomm_integrations.chat.chunks import Chunk, FinalChunk
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.langchain import ChatKVComm
from kvcomm_integrations.wire import RequestReport, SegmentKind, SegmentReport
from tests.engine.helpers import QUESTIONS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:create_react_agent has been moved"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
TASK = " ".join(QUESTIONS)
"""Long enough for the first tokens of it to be a small part."""

Call = tuple[str, dict[str, Any]]
"""Tool and arguments."""
Row = tuple[str, str]
"""Who called, and its contents in order: ``name`` is computed, ``name<agent`` is loaded from that agent's cache, and
``name<past`` carried over from the caller's own last turn."""


class Scripted(ChatKVComm):
    """Calls tools as told, the first time an agent speaks; every other answer is a text of its own."""

    first_calls: dict[str, Call] = {}  # noqa: RUF012 - a pydantic field
    _left: dict[str, Call] = PrivateAttr(default_factory=dict)
    _said: int = PrivateAttr(default=0)
    _told: list[RequestReport] = PrivateAttr(default_factory=list)
    _guard: Any = PrivateAttr(default_factory=threading.Lock)

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._left = dict(self.first_calls)

    def _request(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any]) -> Any:
        request, options = super()._request(messages, stop, kwargs)
        with self._guard:
            call = self._left.pop(request["agent"], None) if request["tools"] else None
            self._said += call is None
            text = f"This is answer {self._said}, by {request['agent']}: {self._said}00 bales of hay should be enough."
        if call is None:
            sampling = replace(request["sampling"], structured_output={"choice": [text]})
            return {**request, "sampling": sampling, "tool_choice": "none"}, options
        name, arguments = call
        tools = [_only(tool, arguments) for tool in request["tools"] if tool["function"]["name"] == name]
        return {**request, "tools": tools, "tool_choice": name}, options

    def _converted(self, chunk: Chunk, blocks: bool) -> ChatGenerationChunk:
        if isinstance(chunk, FinalChunk) and chunk.report is not None:
            with self._guard:
                self._told.append(chunk.report)
        return super()._converted(chunk, blocks)

    @property
    def reports(self) -> list[RequestReport]:
        return self._told


def _only(tool: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The tool, with a schema that allows these arguments only."""
    properties = {name: {"const": value} for name, value in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": list(arguments), "additionalProperties": False}
    return {**tool, "function": {**tool["function"], "parameters": schema}}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports an example by the end of its name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield lambda name: importlib.import_module(f"langgraph_{name}")
    for name in [name for name in sys.modules if (EXAMPLES / f"{name}.py").exists()]:
        del sys.modules[name]


async def _sync(app: Any, inputs: Any, config: Any) -> None:
    await asyncio.to_thread(app.invoke, inputs, config)


async def _async(app: Any, inputs: Any, config: Any) -> None:
    await app.ainvoke(inputs, config)


async def _streaming(app: Any, inputs: Any, config: Any) -> None:
    chunks = [chunk async for chunk, _ in app.astream(inputs, config, stream_mode="messages")]
    assert any(getattr(chunk, "text", "") for chunk in chunks)


WAYS: dict[str, Callable[[Any, Any, Any], Awaitable[None]]] = {
    "invoke": _sync,
    "ainvoke": _async,
    "astream": _streaming,
}


async def in_every_way(
    engine: InProcessEngine, build: Callable[[Any], Any], inputs: list[Any], first_calls: dict[str, Call] | None = None
) -> dict[str, Scripted]:
    """Run an application with each input after the other, in every way at once; the models by way."""

    async def one(way: str) -> Scripted:
        model = Scripted(
            model=engine.config.model,
            engine=engine,
            temperature=0,
            max_tokens=96,
            tenant=uuid.uuid4().hex,  # else the exact prefix cache would be shared between the ways
            first_calls=first_calls or {},
        )
        app, config = build(model), {"configurable": {"thread_id": uuid.uuid4().hex}}
        for given in inputs:
            await WAYS[way](app, given, config)
        return model

    return dict(zip(WAYS, await asyncio.gather(*map(one, WAYS)), strict=True))


def placeholders(report: RequestReport) -> list[SegmentReport]:
    return [part for part in report.segments if part.kind is SegmentKind.PLACEHOLDER]


def told(report: RequestReport) -> Row:
    """A report in the form of a ``Row``; the agent's own ``agent:`` and ``:response`` are left out."""
    said = []
    for part in placeholders(report):
        name = part.name.removeprefix("agent:").replace(":response", "")
        tokens = part.end - part.start
        known = "prefix" if part.exact == tokens else "past" if part.exact + part.carried == tokens else ""
        source = part.source or known
        said.append(f"{name}<{source}" if source else name)
    return report.agent, " ".join(said)


def check(models: dict[str, Scripted], expected: list[Row], *, parallel: bool = False) -> None:
    """In every way of running, the same agents load the same contents from the same caches.

    Args:
        models: by way of running.
        expected: what each request found, in the order of the answers.
        parallel: answers may come in any order.
    """
    for way, model in models.items():
        rows = [told(report) for report in model.reports]
        assert (sorted(rows) == sorted(expected)) if parallel else (rows == expected), (way, rows)
        sessions = {report.session for report in model.reports}
        assert len(sessions) == 1 and next(iter(sessions)).startswith("thread:")
    assert len({model.reports[0].session for model in models.values()}) == len(models)


PATTERNS: dict[str, tuple[dict[str, Call], list[Row]]] = {
    "supervisor_team": (
        {"supervisor": ("transfer_to_solver", {})},
        [
            ("supervisor", "user_question"),
            ("solver", "user_question<supervisor supervisor tool:transfer_to_solver:result"),
            (
                "supervisor",
                "user_question<supervisor supervisor tool:transfer_to_solver:result<solver solver<solver solver#2 "
                "tool:transfer_back_to_supervisor:result",
            ),
        ],
    ),
    "swarm_team": (
        {"planner": ("transfer_to_solver", {})},
        [
            ("planner", "user_question"),
            ("solver", "user_question<planner planner tool:transfer_to_solver:result"),
        ],
    ),
    "create_agent": (
        {"solver": ("hay_price", {"bales": 357})},
        [
            ("solver", "user_question"),
            ("solver", "user_question<solver solver tool:hay_price:result"),
            ("critic", "user_question<solver solver tool:hay_price:result<solver solver#2<solver"),
        ],
    ),
    "subgraphs": (
        {},
        [
            ("solving/planner", "user_question"),
            ("solving/solver", "user_question<solving/planner solving/planner<solving/planner"),
            (
                "writing/writer",
                "user_question<solving/planner solving/planner<solving/planner solving/solver<solving/solver",
            ),
        ],
    ),
}
PATTERNS["create_react_agent"] = PATTERNS["create_agent"]


@pytest.mark.parametrize("pattern", PATTERNS)
async def test_history_of_messages(load: Any, trained: InProcessEngine, pattern: str) -> None:
    calls, expected = PATTERNS[pattern]
    example = load(pattern)
    check(await in_every_way(trained, example.build, [{"messages": [("user", TASK)]}], calls), expected)


async def test_debate(load: Any, trained: InProcessEngine) -> None:
    example = load("debate")
    check(
        await in_every_way(trained, example.build, [{"topic": TASK}]),
        [
            ("favour", "user_question"),
            ("against", "user_question:part<favour favour<favour"),
            ("judge", "user_question:part<favour favour<favour against<against"),
        ],
    )


async def test_rag_with_tools(load: Any, trained: InProcessEngine) -> None:
    example = load("rag_tools")
    calls: dict[str, Call] = {"researcher": ("search_handbook", {"query": "hay"})}
    check(
        await in_every_way(trained, example.build, [{"messages": [("user", TASK)]}], calls),
        [
            ("researcher", "user_question"),
            ("researcher", "user_question<researcher researcher tool:search_handbook:result"),
            (
                "editor",
                "user_question<researcher researcher tool:search_handbook:result<researcher researcher#2<researcher",
            ),
        ],
    )


async def test_map_reduce(load: Any, trained: InProcessEngine) -> None:
    example = load("map_reduce")
    models = await in_every_way(trained, example.build, [{"question": TASK, "documents": example.DOCUMENTS}])
    check(
        models,
        [
            ("reader", "user_question user_question#2"),
            ("reader", "user_question<reader user_question#2"),
            ("reader", "user_question<reader user_question#2"),
            ("editor", "user_question<reader reader<reader reader#2<reader reader#3<reader"),
        ],
        parallel=True,
    )


async def test_functional(load: Any, trained: InProcessEngine) -> None:
    example = load("functional")
    check(
        await in_every_way(trained, example.build, [TASK]),
        [
            ("panel/estimate", "user_question"),
            ("panel/estimate", "user_question<panel/estimate"),
            (
                "panel/judge",
                "user_question<panel/estimate panel/estimate<panel/estimate panel/estimate#2<panel/estimate",
            ),
        ],
        parallel=True,
    )


async def test_thread(load: Any, trained: InProcessEngine) -> None:
    example = load("thread")
    turns = [{"messages": [("user", question)]} for question in (TASK, example.FOLLOW_UP)]
    check(
        await in_every_way(trained, example.build, turns),
        [
            ("solver", "user_question"),
            ("critic", "user_question<solver solver<solver"),
            ("solver", "user_question<solver solver<solver critic<critic user_question#2"),
            # The second question is shorter than what is repaired at the beginning of its run with the answer; what
            # comes before the critic's own answer is of its own last turn.
            ("critic", "user_question<past solver<past critic<critic user_question#2 solver#2<solver"),
        ],
    )


async def test_human_in_the_loop(load: Any, trained: InProcessEngine) -> None:
    example = load("human_in_the_loop")
    inputs = [{"messages": [("user", TASK)]}, Command(resume=example.REMARK)]
    check(
        await in_every_way(trained, example.build, inputs),
        [("solver", "user_question"), ("writer", "user_question<solver solver<solver user_question#2")],
    )
