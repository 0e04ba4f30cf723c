"""From the chunks of an answer to AutoGen's ``CreateResult``, and to the strings a stream yields."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import cast

from autogen_core import FunctionCall
from autogen_core.models import ChatCompletionTokenLogprob, CreateResult, FinishReasons, RequestUsage, TopLogprob

from kvcomm_integrations.chat.chunks import CallChunk, Chunk, FinalChunk, InvalidCallChunk, ReasoningChunk, TextChunk
from kvcomm_integrations.engines.interface import TokenLogprob
from kvcomm_integrations.errors import EngineError

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_FINISH = {"stop": "stop", "length": "length", "tool_calls": "function_calls"}
_NOT_IN_NAME = re.compile(r"[^a-zA-Z0-9_-]")


class Answer:
    """Collects the chunks of one answer."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.text = ""
        self.calls: list[FunctionCall] = []
        self._by_index: dict[int, FunctionCall] = {}
        self._end: FinalChunk | None = None
        self._thinking = False

    @property
    def end(self) -> FinalChunk:
        """The last chunk.

        Raises:
            EngineError: it has not come.
        """
        if self._end is None:
            raise EngineError("the answer ended before its last chunk; the engine may have died, see its log")
        return self._end

    def add(self, chunk: Chunk) -> list[str]:
        """Take one chunk; what a stream shows of it. Thinking is shown between ``<think>`` tags."""
        if isinstance(chunk, ReasoningChunk):
            self.reasoning += chunk.text
            opening = "" if self._thinking else THINK_OPEN
            self._thinking = True
            return [opening + chunk.text]
        shown = [THINK_CLOSE] if self._thinking else []
        self._thinking = False
        if isinstance(chunk, TextChunk):
            self.text += chunk.text
            shown += [chunk.text] if chunk.text else []
        elif isinstance(chunk, CallChunk):
            self._add_call(chunk)
        elif isinstance(chunk, InvalidCallChunk):
            shown += self._withdraw(chunk)
        else:
            self._end = chunk
        return shown

    def _add_call(self, chunk: CallChunk) -> None:
        call = self._by_index.get(chunk.index)
        if call is None:
            call = self._by_index[chunk.index] = FunctionCall(id="", arguments="", name="")
            self.calls.append(call)
        call.id += chunk.id or ""
        call.name += _NOT_IN_NAME.sub("_", chunk.name or "")[:64]
        call.arguments += chunk.arguments

    def _withdraw(self, chunk: InvalidCallChunk) -> list[str]:
        """A call that was cut off or has no name becomes text, so that nothing runs it.

        Arguments that are no JSON AutoGen refuses itself, and tells the model.
        """
        if chunk.name and not chunk.cut:
            return []
        self.calls.remove(self._by_index.pop(chunk.index))
        name = chunk.name or "A function without a name"
        note = f"[{name} was not called: {chunk.error}. The model wrote: {chunk.written}]"
        shown = f"\n\n{note}" if self.text else note
        self.text += shown
        return [shown]

    def result(self) -> CreateResult:
        """The finished answer. Beside calls, reasoning and text both go into the thought.

        Raises:
            EngineError: the last chunk has not come.
        """
        end = self.end
        for call in self.calls:
            call.arguments = call.arguments.strip() or "{}"
        reason = _FINISH.get(end.finish_reason, "unknown")
        if reason == "function_calls" and not self.calls:
            reason = "stop"
        thought = join_thought(self.reasoning, self.text) if self.calls else self.reasoning
        return CreateResult(
            finish_reason=cast(FinishReasons, reason),
            content=list(self.calls) if self.calls else self.text,
            usage=RequestUsage(prompt_tokens=end.usage.prompt_tokens, completion_tokens=end.usage.completion_tokens),
            cached=False,
            logprobs=[_logprob(entry) for entry in end.logprobs] or None,
            thought=thought or None,
        )


def join_thought(reasoning: str, text: str) -> str:
    """One thought from the reasoning and the text that came with tool calls."""
    return "\n\n".join(part for part in (reasoning, text) if part)


def _logprob(entry: TokenLogprob) -> ChatCompletionTokenLogprob:
    top = [TopLogprob(logprob=logprob, bytes=_bytes(token)) for _, token, logprob in entry.top]
    return ChatCompletionTokenLogprob(
        token=entry.token, logprob=entry.logprob, top_logprobs=top, bytes=_bytes(entry.token)
    )


def _bytes(token: str) -> list[int]:
    return list(token.encode("utf-8", "surrogatepass"))


class ThoughtMemory:
    """Which part of a thought was reasoning and which was text, by the id of the first call it came with.

    AutoGen has one field for both, but a chat template treats them differently. Bounded; every step on the dict is one
    operation, so threads need no lock.
    """

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._parts: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def note(self, answer: Answer) -> None:
        """Remember an answer that has calls and reasoning."""
        if answer.calls and answer.reasoning:
            self._parts[answer.calls[0].id] = (answer.reasoning, answer.text)
            while len(self._parts) > self._size:
                self._parts.popitem(last=False)

    def split(self, calls: Sequence[FunctionCall], thought: str) -> tuple[str, str]:
        """Reasoning and text of an earlier answer; a thought that is not remembered is text."""
        parts = self._parts.get(calls[0].id) if calls else None
        return parts if parts is not None and join_thought(*parts) == thought else ("", thought)
