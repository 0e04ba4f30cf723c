"""One OpenTelemetry span per chat call, after the GenAI semantic conventions, with what was reused.

Nothing is recorded unless the application has set a tracer provider up, and nothing is needed if the OpenTelemetry API
is not installed. Spans never hold text of prompts or answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from kvcomm_integrations._version import __version__
from kvcomm_integrations.chat.chunks import Chunk, FinalChunk
from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.interface import GenerationRequest

TRACER = "kvcomm_integrations"
PROVIDER = "vllm"

_SAMPLING = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
"""Sampling options and the attributes they become, where they are set."""


class ChatSpan:
    """A chat call's span while the answer arrives.

    Args:
        span: OpenTelemetry's span; ``None`` where nothing is recorded.
        model: the model's name.
    """

    def __init__(self, span: Any = None, model: str = "") -> None:
        self._span = span
        self._model = model

    def note(self, chunk: Chunk) -> None:
        """Take in a chunk of the answer; the last one carries usage and report."""
        if self._span is not None and isinstance(chunk, FinalChunk):
            self._span.set_attributes(_response(self._model, chunk))


@contextmanager
def chat_span(config: EngineConfig, request: GenerationRequest) -> Iterator[ChatSpan]:
    """A span named ``chat {model}`` around one call, whatever number of tries it takes.

    It is a child of the caller's current span, but does not become current itself: between the chunks of a stream
    other code runs, which is not part of the call.
    """
    tracer = _tracer()
    if tracer is None:
        yield ChatSpan()
        return
    from opentelemetry.trace import SpanKind, Status, StatusCode

    kind = SpanKind.CLIENT if config.base_url else SpanKind.INTERNAL
    span = tracer.start_span(f"chat {config.model}", kind=kind)
    if span.is_recording():
        span.set_attributes(_request(config, request))
    try:
        yield ChatSpan(span if span.is_recording() else None, config.model)
    except (GeneratorExit, asyncio.CancelledError):  # the caller has heard enough
        span.set_attribute("kvcomm.cancelled", True)
        raise
    except Exception as error:
        span.set_attribute("error.type", type(error).__qualname__)
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, str(error)))
        raise
    finally:
        span.end()


def _tracer() -> Any:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace.get_tracer(TRACER, __version__)


def _request(config: EngineConfig, request: GenerationRequest) -> dict[str, Any]:
    sampling, params = request.sampling, request.params
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": config.model,
        "gen_ai.agent.name": params.agent,
        "gen_ai.conversation.id": params.session,
        "gen_ai.output.type": "json" if sampling.structured_output else "text",
        "kvcomm.request.mode": params.mode.value,
    }
    for option, attribute in _SAMPLING.items():
        value = getattr(sampling, option)
        if value is not None:
            attributes[attribute] = value
    if sampling.stop:
        attributes["gen_ai.request.stop_sequences"] = list(sampling.stop)
    if config.base_url:
        address = urlsplit(config.base_url)
        attributes["server.address"] = address.hostname or ""
        if address.port is not None:
            attributes["server.port"] = address.port
    return attributes


def _response(model: str, last: FinalChunk) -> dict[str, Any]:
    usage, report = last.usage, last.report
    attributes: dict[str, Any] = {
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [last.finish_reason],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cache_read,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        "kvcomm.tokens.exact": usage.exact,
        "kvcomm.tokens.loaded": usage.loaded,
        "kvcomm.tokens.repaired": usage.repaired,
        "kvcomm.tokens.computed": usage.prompt_tokens - usage.exact - usage.loaded - usage.repaired,
    }
    if last.ttft_ms is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = last.ttft_ms / 1e3
    if report is not None:
        attributes |= {
            "kvcomm.mode": report.mode.value,
            "kvcomm.policy": report.policy,
            "kvcomm.reason": report.reason,
            "kvcomm.plan_seconds": report.plan_ms / 1e3,
            "kvcomm.load_seconds": report.load_ms / 1e3,
            "kvcomm.repair_seconds": report.repair_ms / 1e3,
        }
    return attributes
