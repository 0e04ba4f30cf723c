"""The log of requests: what is kept of each, how it ends, and what is never kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcomm_integrations.chat.request_log import CONTENT_VARIABLE, PHASES, RequestLog, RunRecord
from kvcomm_integrations.chat.runtime import ChatRuntime
from kvcomm_integrations.engines.fake import FakeEngine
from kvcomm_integrations.errors import ConfigurationError, EngineError
from kvcomm_integrations.prompts.chat_message import ChatMessage
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.report.run_report import RunReport, read_runs
from kvcomm_integrations.wire import Mode

QUESTION = (
    "How many bales of hay do twelve cows and fifteen sheep eat in a week, if a cow eats three a day, a sheep a third "
    "of that, and every Sunday all of them get half of what they eat on any other day of the week?"
)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> ChatTokenizer:
    return ChatTokenizer.from_pretrained(str(demo_model))


def ask(runtime: ChatRuntime, role: str, agent: str, mode: Mode = Mode.AUTO) -> None:
    chat = runtime.prepare(
        [ChatMessage("system", role), ChatMessage("user", QUESTION)], agent=agent, session="s", mode=mode
    )
    list(runtime.stream_sync(chat))


def test_a_request_leaves_a_row(tokenizer: ChatTokenizer) -> None:
    runtime = ChatRuntime(FakeEngine(tokenizer, "It is four.", latency=0.01))
    ask(runtime, "You plan.", "planner")
    ask(runtime, "You solve.", "solver")
    first, second = runtime.runs.records()
    assert (first.number, second.number) == (1, 2)
    assert (second.agent, second.session, second.finish_reason) == ("solver", "s", "stop")
    assert second.loaded > 0 and second.segments
    assert second.exact + second.loaded + second.repaired + second.computed == second.prompt_tokens
    assert second.completion_tokens == len(tokenizer.encode("It is four.", allow_special=False)) + 1
    assert second.ttft_ms is not None and second.total_ms >= second.ttft_ms > 0 and second.prepare_ms > 0
    assert not runtime.runs.running()


def test_async_requests_are_recorded_too(tokenizer: ChatTokenizer) -> None:
    runtime = ChatRuntime(FakeEngine(tokenizer, "It is four."))

    async def go() -> None:
        chat = await runtime.aprepare([ChatMessage("user", QUESTION)])
        async for _ in runtime.stream(chat):
            assert len(runtime.runs.running()) == 1 or runtime.runs.records()

    asyncio.run(go())
    assert [record.finish_reason for record in runtime.runs.records()] == ["stop"]


def test_errors_and_closed_streams_end_their_rows(tokenizer: ChatTokenizer) -> None:
    runtime = ChatRuntime(FakeEngine(tokenizer, [EngineError("secret words in a message"), "one two three four"]))
    chat = runtime.prepare([ChatMessage("user", QUESTION)])
    with pytest.raises(EngineError):
        list(runtime.stream_sync(chat))
    stream = runtime.stream_sync(chat)
    next(stream)
    stream.close()
    failed, aborted = runtime.runs.records()
    assert (failed.finish_reason, failed.error, failed.ttft_ms) == ("error", "EngineError", None)
    assert (aborted.finish_reason, aborted.error) == ("abort", "")
    assert "secret" not in failed.model_dump_json()
    assert not runtime.runs.running()


def test_texts_are_kept_only_where_asked(tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ChatRuntime(FakeEngine(tokenizer, "It is four."))
    ask(runtime, "You plan.", "planner")
    (row,) = runtime.runs.records()
    assert row.texts is None and row.answer is None
    assert "hay" not in row.model_dump_json() and "four" not in row.model_dump_json()
    monkeypatch.setenv(CONTENT_VARIABLE, "1")
    open_runtime = ChatRuntime(FakeEngine(tokenizer, "It is four."))
    ask(open_runtime, "You plan.", "planner")
    (row,) = open_runtime.runs.records()
    assert row.texts is not None and len(row.texts) == len(row.segments) and QUESTION in "".join(row.texts)
    assert row.answer == "It is four."


def test_a_log_is_bounded(record: Callable[..., RunRecord]) -> None:
    log = RequestLog("m", limit=3)
    for number in range(5):
        log.add(record(number=number))
    assert [row.number for row in log.records()] == [2, 3, 4]
    log.clear()
    assert log.records() == []


def test_phases_add_up(record: Callable[..., RunRecord]) -> None:
    row = record()
    assert tuple(row.phases) == PHASES
    assert sum(row.phases.values()) == pytest.approx(row.total_ms)
    assert sum(list(row.phases.values())[:-1]) == pytest.approx(row.ttft_ms)
    assert min(record(ttft_ms=1.0, total_ms=0.5).phases.values()) >= 0


def test_json_lines_go_there_and_back(run: list[RunRecord], tmp_path: Path) -> None:
    path = RunReport(run).to_jsonl(tmp_path / "run.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == len(run) and all(not isinstance(row[key], dict) for row in rows for key in row)
    assert RunReport.read(path).records == tuple(run)
    as_list = tmp_path / "run.json"
    as_list.write_text(json.dumps(rows))
    assert RunReport.read(as_list).records == tuple(run)
    assert len(read_runs([path, as_list])) == 2 * len(run)
    assert RunReport(run).segment_rows()[0]["agent"] == "solver"


def test_a_table_of_agents(run: list[RunRecord]) -> None:
    rows = RunReport(run).agents()
    assert [row["agent"] for row in rows] == ["planner", "solver", "critic"]
    assert (rows[1]["loaded_tokens"], rows[1]["ttft_ms"], rows[1]["dense_ttft_ms"]) == (45.0, 50.0, 150.0)
    assert RunReport(run)._repr_html_().count("<tr>") == 4


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "line 1"),
        ("[{]", "not valid JSON"),
        ('{"a": 1}', "holds no run: entry 1"),
        ('{"agent": "a", "segments": [], "prompt_tokens": "many"}', "prompt_tokens"),
    ],
)
def test_a_wrong_file_is_named(content: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"x\.jsonl") as caught:
        RunReport.read(path)
    assert told in str(caught.value)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        RunReport.read(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigurationError, match="cannot write"):
        RunReport([]).to_html(tmp_path / "missing" / "report.html")
