"""Collects one growing answer: deltas in, chunks out, and at the end the registered response and the usage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvcomm_integrations.chat.chunks import (
    AnswerChunk,
    CallChunk,
    FinalChunk,
    InvalidCallChunk,
    ReasoningChunk,
    TextChunk,
    Usage,
)
from kvcomm_integrations.chat.tool_format import AnswerParser, ToolFormat, ToolUse
from kvcomm_integrations.engines.interface import Delta, GenerationRequest, TokenLogprob
from kvcomm_integrations.errors import EngineError
from kvcomm_integrations.prompts.content_registry import ContentRegistry
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import RequestReport


@dataclass(frozen=True)
class PreparedChat:
    """A request that is ready to run, and what is needed to read its answer."""

    request: GenerationRequest
    tools: ToolUse
    tool_format: ToolFormat
    constrained: bool
    """The answer follows a JSON constraint the caller asked for."""
    prepare_ms: float = 0.0
    """What building the request took, milliseconds."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, tokens."""
        return len(self.request.prompt.token_ids)


class AnswerCollector:
    """State of one answer while it streams.

    Args:
        tokenizer: The model's tokenizer.
        registry: Where the finished response is registered.
        session: The session's key in the registry.
        chat: The request being answered.
    """

    def __init__(self, tokenizer: ChatTokenizer, registry: ContentRegistry, session: str, chat: PreparedChat) -> None:
        self._tokenizer = tokenizer
        self._registry = registry
        self._session = session
        self._chat = chat
        self._parser = chat.tool_format.parser(tokenizer, chat.tools, chat.request.prompt, constrained=chat.constrained)
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls = _Calls(self._parser, chat)
        self._invalid: tuple[InvalidCallChunk, ...] = ()
        self._end: Delta | None = None

    def feed(self, delta: Delta) -> Iterator[AnswerChunk | InvalidCallChunk]:
        """Take one delta and yield the chunks that are certain by now; at the end, which calls must not be run."""
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        ended = delta.finish_reason is not None
        if ended:
            self._end = delta
        for chunk in self._parser.feed(delta.text, delta.token_ids, last=ended):
            self._note(chunk)
            yield chunk
        self._calls.text += delta.text
        if ended:
            self._invalid = tuple(self._calls.invalid(delta, len(self._token_ids)))
            yield from self._invalid

    def last(self) -> FinalChunk:
        """Register the response and sum the answer up.

        Raises:
            EngineError: the engine's stream ended without a finish reason.
        """
        end = self._end
        if end is None:
            raise EngineError("the engine's stream ended without a finish reason; it may have died, see its log")
        reason = end.finish_reason or "stop"
        return FinalChunk(
            finish_reason="tool_calls" if reason == "stop" and self._called else reason,
            usage=self._usage(end),
            report=end.report,
            segment_id=None if reason == "abort" else self._register(end),
            stop_reason=end.stop_reason,
            logprobs=tuple(self._logprobs),
            ttft_ms=end.ttft_ms,
            invalid_calls=self._invalid,
        )

    @property
    def _called(self) -> bool:
        """The model has called something, be it with arguments that are no JSON."""
        return len(self._calls.parts) > sum(call.cut for call in self._invalid)

    def _note(self, chunk: AnswerChunk) -> None:
        if isinstance(chunk, TextChunk):
            self._text.append(chunk.text)
        elif isinstance(chunk, ReasoningChunk):
            self._reasoning.append(chunk.text)
        elif isinstance(chunk, CallChunk):
            self._calls.parts.setdefault(chunk.index, []).append(chunk)

    def _ids_of(self, text: str, end: Delta) -> tuple[int, ...]:
        """The generated ids of ``text``, or none if no run of them spells it (a stop string cut a token in two).

        Its last occurrence counts: an answer follows the thinking that may quote it.
        """
        ids = self._token_ids
        if ids and end.finish_reason == "stop" and ids[-1] in (*self._tokenizer.eos_token_ids, end.stop_reason):
            ids = ids[:-1]  # the token that ended the answer
        whole = self._tokenizer.codec.decode_exact(ids)
        at = whole.rfind(text)
        found = self._tokenizer.slice(ids, whole, at, at + len(text)) if at >= 0 else None
        return tuple(found or ())

    def _register(self, end: Delta) -> str | None:
        text = "".join(self._text)
        if not text.strip():
            return None
        agent = self._chat.request.params.agent
        return str(self._registry.register_response(self._session, agent, text, self._ids_of(text, end)).id)

    def _usage(self, end: Delta) -> Usage:
        report = end.report or RequestReport(exact=end.cached_tokens)
        thinking = "".join(self._reasoning)
        return Usage(
            prompt_tokens=end.prompt_tokens or self._chat.prompt_tokens,
            completion_tokens=end.completion_tokens or len(self._token_ids),
            reasoning_tokens=self._tokenizer.count(thinking) if thinking else 0,
            exact=report.exact,
            carried=report.carried,
            loaded=report.loaded,
            repaired=report.repaired,
        )


class _Calls:
    """The calls of one answer, and which of them must not be run.

    Args:
        parser: Knows which calls the model has closed.
        chat: The request being answered.
    """

    def __init__(self, parser: AnswerParser, chat: PreparedChat) -> None:
        self.parts: dict[int, list[CallChunk]] = {}
        self.text = ""
        self._parser = parser
        self._limit = chat.request.sampling.max_tokens
        self._required = {
            tool["function"]["name"]: tuple((tool["function"].get("parameters") or {}).get("required") or ())
            for tool in chat.tools.tools
        }

    def invalid(self, end: Delta, size: int) -> Iterator[InvalidCallChunk]:
        """The calls that the end of the answer (of ``size`` tokens) has cut off, and those without a JSON object."""
        for index, parts in self.parts.items():
            name = next((part.name for part in parts if part.name), "")
            arguments = "".join(part.arguments for part in parts)
            fault, cut = self._fault(index, name, arguments, end)
            if not fault:
                continue
            if cut:
                fault = f"{self._what_ended(end, size)} {fault}"
            call_id = next((part.id for part in parts if part.id), None)
            written = self._written(index, name, arguments) if cut else arguments
            yield InvalidCallChunk(index, call_id, name, arguments, written, fault, cut)

    def _fault(self, index: int, name: str, arguments: str, end: Delta) -> tuple[str, bool]:
        """What is wrong with a call, if anything, and whether the end of the answer is to blame."""
        interrupted = end.finish_reason in ("length", "abort")
        stopped = isinstance(end.stop_reason, str)
        given, fault = _read(arguments)
        closed = self._parser.closed(index)
        if (interrupted and closed is not True) or (closed is False and (stopped or given is not None)):
            return "before this call was complete, so it is not run", True
        if not name:
            return "the call names no function, so it is not run", False
        if given is None:
            return fault, False
        missing = [field for field in self._required.get(name, ()) if field not in given]
        if interrupted and missing:
            return f"and this call lacks required arguments ({', '.join(missing)}), so it is not run", True
        return "", False

    def _what_ended(self, end: Delta, size: int) -> str:
        if end.finish_reason == "length":
            if self._limit is not None and size >= self._limit:
                return f"the answer was cut off (finish_reason 'length': raise max_tokens={self._limit})"
            return "the answer was cut off (finish_reason 'length': the model's context is full; shorten the prompt)"
        if isinstance(end.stop_reason, str):
            return f"the answer ended at the stop string {end.stop_reason!r}"
        return "the answer was aborted" if end.finish_reason == "abort" else "the answer ended"

    def _written(self, index: int, name: str, arguments: str) -> str:
        """The arguments as they stand in the text, or what stands there from the call's name on.

        vLLM's parsers hold back what may turn out to be an end, so the last call's go to the end of the text.
        """
        named = max(self.text.rfind(name), 0)
        start = self.text.find(arguments, named) if arguments else -1
        if start < 0:
            start = self.text.rfind(arguments) if arguments and arguments in self.text else named
        return self.text[start:] if index == max(self.parts) else arguments


def _read(arguments: str) -> tuple[dict[str, Any] | None, str]:
    """Arguments as an object, or why they are none."""
    try:
        value = json.loads(arguments or "{}", strict=False)
    except ValueError as error:
        return None, f"the arguments are not JSON: {error}"
    if isinstance(value, dict):
        return value, ""
    return None, f"arguments must be a JSON object, not {type(value).__name__}"
