"""Collects one growing answer: deltas in, pieces out, and at the end the registered response and the usage."""

from __future__ import annotations

from collections.abc import Iterator

from kvcomm_integrations.chat.chunks import (
    AnswerChunk,
    CallChunk,
    FinalChunk,
    ReasoningChunk,
    TextChunk,
    Usage,
)
from kvcomm_integrations.chat.tool_format import AnswerParser
from kvcomm_integrations.engines.interface import Delta, GenerationRequest, TokenLogprob
from kvcomm_integrations.errors import EngineError
from kvcomm_integrations.prompts.content_registry import ContentRegistry
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import RequestReport


class AnswerCollector:
    """State of one answer while it streams.

    Args:
        tokenizer: The model's tokenizer.
        registry: Where the finished response is registered.
        parser: Splits the text into pieces.
        request: The request being answered.
        session: The session's key in the registry.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        registry: ContentRegistry,
        parser: AnswerParser,
        request: GenerationRequest,
        session: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._registry = registry
        self._parser = parser
        self._request = request
        self._session = session
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._called = False
        self._end: Delta | None = None

    def feed(self, delta: Delta) -> Iterator[AnswerChunk]:
        """Take one delta and yield the pieces that are certain by now."""
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        ended = delta.finish_reason is not None
        if ended:
            self._end = delta
        for piece in self._parser.feed(delta.text, delta.token_ids, last=ended):
            self._note(piece)
            yield piece

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
            finish_reason="tool_calls" if self._called and reason == "stop" else reason,
            usage=self._usage(end),
            report=end.report,
            segment_id=None if reason == "abort" else self._register(),
            stop_reason=end.stop_reason,
            logprobs=tuple(self._logprobs),
            ttft_ms=end.ttft_ms,
        )

    def _note(self, piece: AnswerChunk) -> None:
        if isinstance(piece, TextChunk):
            self._text.append(piece.text)
        elif isinstance(piece, ReasoningChunk):
            self._reasoning.append(piece.text)
        elif isinstance(piece, CallChunk):
            self._called = True

    def _answer_ids(self) -> list[int]:
        """Generated ids without the token that ended the answer."""
        ids, end = self._token_ids, self._end
        if not ids or end is None or end.finish_reason != "stop":
            return ids
        ended_by_token = ids[-1] in self._tokenizer.eos_token_ids or ids[-1] == end.stop_reason
        return ids[:-1] if ended_by_token else ids

    def _ids_of(self, text: str) -> tuple[int, ...]:
        """The generated ids of ``text``, or none if no run of them spells it (a stop string cut a token in two).

        Its last occurrence counts: an answer follows the thinking that may quote it.
        """
        ids = self._answer_ids()
        whole = self._tokenizer.codec.decode_exact(ids)
        at = whole.rfind(text)
        found = self._tokenizer.slice(ids, whole, at, at + len(text)) if at >= 0 else None
        return tuple(found or ())

    def _register(self) -> str | None:
        text = "".join(self._text)
        if not text.strip():
            return None
        ids = self._ids_of(text)
        content = self._registry.register_response(self._session, self._request.params.agent, text, ids)
        return str(content.id)

    def _usage(self, end: Delta) -> Usage:
        report = end.report or RequestReport(exact=end.cached_tokens)
        thinking = "".join(self._reasoning)
        return Usage(
            prompt_tokens=end.prompt_tokens or len(self._request.prompt.token_ids),
            completion_tokens=end.completion_tokens or len(self._token_ids),
            reasoning_tokens=self._tokenizer.count(thinking) if thinking else 0,
            exact=report.exact,
            loaded=report.loaded,
            repaired=report.repaired,
        )
