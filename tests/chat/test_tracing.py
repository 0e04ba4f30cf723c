"""Spans of chat calls, recorded in memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvcomm_integrations.chat.chunks import FinalChunk
from kvcomm_integrations.chat.runtime import ChatRuntime
from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.fake import FakeEngine
from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.errors import EngineError
from kvcomm_integrations.prompts.chat_message import ChatMessage

MESSAGES = [ChatMessage(role="user", content="How many primes are there below one hundred, and which is the largest?")]


class Recorded:
    """A tracer provider of the test's own, in place of the application's."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        patch.setattr(trace, "get_tracer", self.provider.get_tracer)

    @property
    def chats(self) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name.startswith("chat ")]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def runtime(tiny_model: Path, script: object = "There are 25.", base_url: str | None = None) -> ChatRuntime:
    config = EngineConfig(model="org/tiny", base_url=base_url)
    return ChatRuntime(FakeEngine(tiny_model, script, config=config))  # type: ignore[arg-type]


def test_a_call_is_one_span_with_its_tokens(tiny_model: Path, recorded: Recorded) -> None:
    chats = runtime(tiny_model)
    for agent in ("solver", "critic"):
        sampling = SamplingOptions(max_tokens=20, temperature=0.5, stop=("\n\n",))
        chat = chats.prepare(MESSAGES, agent=agent, session="s1", sampling=sampling)
        with recorded.provider.get_tracer("app").start_as_current_span("graph") as parent:
            *_, last = chats.stream_sync(chat)
        assert isinstance(last, FinalChunk)
        span = recorded.chats[-1]
        assert span.name == "chat org/tiny"
        assert span.kind is SpanKind.INTERNAL
        assert span.parent is not None
        assert span.parent.span_id == parent.get_span_context().span_id
        told = dict(span.attributes or {})
        usage, report = last.usage, last.report
        assert report is not None
        expected = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": "org/tiny",
            "gen_ai.response.model": "org/tiny",
            "gen_ai.agent.name": agent,
            "gen_ai.conversation.id": "s1",
            "gen_ai.output.type": "text",
            "gen_ai.request.max_tokens": 20,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.stop_sequences": ("\n\n",),
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.exact + usage.loaded,
            "kvcomm.tokens.exact": report.exact,
            "kvcomm.tokens.loaded": report.loaded,
            "kvcomm.tokens.repaired": report.repaired,
            "kvcomm.tokens.computed": report.computed,
            "kvcomm.mode": report.mode.value,
        }
        assert expected.items() <= told.items()
    assert len(recorded.chats) == 2


async def test_a_call_in_a_loop_is_a_child_of_its_caller(tiny_model: Path, recorded: Recorded) -> None:
    chats = runtime(tiny_model, base_url="http://10.0.0.7:8000/v1")
    chat = await chats.aprepare(MESSAGES)
    with recorded.provider.get_tracer("app").start_as_current_span("graph") as parent:
        async for _ in chats.stream(chat, timeout=30):
            assert trace.get_current_span() is parent  # other code of the caller is not part of the call
    [span] = recorded.chats
    assert span.parent is not None
    assert span.parent.span_id == parent.get_span_context().span_id
    assert span.kind is SpanKind.CLIENT
    assert {"server.address": "10.0.0.7", "server.port": 8000}.items() <= dict(span.attributes or {}).items()


def test_with_a_time_limit_the_caller_is_still_the_parent(tiny_model: Path, recorded: Recorded) -> None:
    chats = runtime(tiny_model)
    with recorded.provider.get_tracer("app").start_as_current_span("graph") as parent:
        list(chats.stream_sync(chats.prepare(MESSAGES), timeout=30))
    [span] = recorded.chats
    assert span.parent is not None
    assert span.parent.span_id == parent.get_span_context().span_id


def test_an_error_is_named_and_a_retry_is_the_same_call(tiny_model: Path, recorded: Recorded) -> None:
    chats = runtime(tiny_model, [EngineError("busy"), "fine", EngineError("dead")])
    list(chats.stream_sync(chats.prepare(MESSAGES), retries=1))
    with pytest.raises(EngineError):
        list(chats.stream_sync(chats.prepare(MESSAGES)))
    retried, failed = recorded.chats
    assert retried.status.status_code is StatusCode.UNSET
    assert failed.status.status_code is StatusCode.ERROR
    assert (failed.attributes or {})["error.type"] == "EngineError"


def test_a_stream_left_early_ends_its_span(tiny_model: Path, recorded: Recorded) -> None:
    chats = runtime(tiny_model, "one two three four five six seven eight nine ten")
    stream = chats.stream_sync(chats.prepare(MESSAGES))
    next(stream)
    assert not recorded.chats
    stream.close()
    [span] = recorded.chats
    assert (span.attributes or {})["kvcomm.cancelled"] is True
    assert span.status.status_code is StatusCode.UNSET


def test_no_text_is_in_a_span(tiny_model: Path, recorded: Recorded) -> None:
    chats = runtime(tiny_model)
    list(chats.stream_sync(chats.prepare(MESSAGES)))
    [span] = recorded.chats
    assert "primes" not in span.to_json()
    assert "There are 25" not in span.to_json()


def test_without_a_provider_or_without_the_package_nothing_changes(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = runtime(tiny_model)
    plain = list(chats.stream_sync(chats.prepare(MESSAGES, session="a")))
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    without = list(chats.stream_sync(chats.prepare(MESSAGES, session="b")))
    assert plain[:-1] == without[:-1]
