"""One OpenTelemetry span per chat call, after the GenAI semantic conventions, with what was reused.

Nothing is recorded unless the application has set a tracer provider up, and nothing is needed if the OpenTelemetry API
is not installed. Spans never hold text of prompts or answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from kvcomm_integrations._version import __version__
from kvcomm_integrations.chat.chunks import Chunk, FinalChunk
from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.interface import GenerationRequest
from kvcomm_integrations.wire import TREATMENTS

TRACER = "kvcomm_integrations"
PROVIDER = "vllm"

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
"""Sampling options that become attributes ``gen_ai.request.*``, where they are set."""


@contextmanager
def chat_span(config: EngineConfig, request: GenerationRequest) -> Iterator[Callable[[Chunk], None]]:
    """A span named ``chat {model}`` around one call, whatever number of tries it takes. Yields what takes the chunks.

    It is a child of the caller's current span, but does not become current itself: between the chunks of a stream
    other code runs, which is not part of the call.
    """
    tracer = _tracer()
    if tracer is None:
        yield lambda chunk: None
        return
    from opentelemetry.trace import SpanKind, Status, StatusCode

    kind = SpanKind.CLIENT if config.base_url else SpanKind.INTERNAL
    span = tracer.start_span(f"chat {config.model}", kind=kind)

    def note(chunk: Chunk) -> None:
        if span.is_recording() and isinstance(chunk, FinalChunk):  # the last one carries usage and report
            span.set_attributes(_response(config.model, chunk))

    if span.is_recording():
        span.set_attributes(_request(config, request))
    try:
        yield note
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
    for option in _SAMPLING:
        if (value := getattr(sampling, option)) is not None:
            attributes[f"gen_ai.request.{option}"] = value
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
        **{f"kvcomm.tokens.{way}": getattr(usage, way) for way in TREATMENTS[:-1]},
        "kvcomm.tokens.computed": usage.prompt_tokens - usage.cache_read - usage.repaired,
    }
    if last.ttft_ms is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = last.ttft_ms / 1e3
    if report is not None:
        attributes |= {
            "kvcomm.mode": report.mode.value,
            "kvcomm.policy": report.policy,
            "kvcomm.reason": report.reason,
            **{f"kvcomm.{step}_seconds": getattr(report, f"{step}_ms") / 1e3 for step in ("plan", "load", "repair")},
        }
    return attributes
