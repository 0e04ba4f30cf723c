"""The typed chunks a chat answer arrives in. Pure data; no engine, no tool format, no framework."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcomm_integrations.engines.interface import TokenLogprob
from kvcomm_integrations.wire import RequestReport


@dataclass(frozen=True)
class TextChunk:
    """Some more of the answer's text."""

    text: str


@dataclass(frozen=True)
class ReasoningChunk:
    """Some more of the model's thinking, which is not part of the answer."""

    text: str


@dataclass(frozen=True)
class CallChunk:
    """A fragment of a tool call. The first fragment of a call carries ``id`` and ``name``, later ones arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    """JSON text; the fragments of one ``index`` concatenate to the whole arguments."""


@dataclass(frozen=True)
class InvalidCallChunk:
    """A call that must not be run although its fragments have been handed out. Comes after the last of them."""

    index: int
    id: str | None
    name: str
    arguments: str
    """The fragments of its arguments in one."""
    written: str
    """What the model wrote of the arguments; a parser may have closed or held back some of it."""
    error: str
    """Why it is no call, and what to do."""
    cut: bool
    """The end of the answer is to blame; else the model wrote arguments that are no JSON object."""


@dataclass(frozen=True)
class Usage:
    """Token counts of one request. Only materialised tokens are counted as reused."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    exact: int = 0
    """Prompt tokens from the prefix cache."""
    carried: int = 0
    """Prompt tokens taken over from the agent's own past."""
    loaded: int = 0
    """Prompt tokens loaded from a reference plus correction."""
    repaired: int = 0
    """Prompt tokens computed by the repair pass."""

    @property
    def cache_read(self) -> int:
        """Prompt tokens whose KV was read instead of computed."""
        return self.exact + self.carried + self.loaded

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class FinalChunk:
    """The end of an answer: why it ended, what it cost, and under which id its text is known from now on."""

    finish_reason: str
    """``stop``, ``length``, ``tool_calls`` or ``abort``."""
    usage: Usage = field(default_factory=Usage)
    report: RequestReport | None = None
    segment_id: str | None = None
    """Id of the answer's text in the session's content registry; ``None`` if there was no text to register."""
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    ttft_ms: float | None = None
    number: int = 0
    """The request's position in its engine's log, from 1."""
    invalid_calls: tuple[InvalidCallChunk, ...] = ()
    """The invalid calls of the answer once more."""


AnswerChunk = TextChunk | ReasoningChunk | CallChunk
"""What a tool format produces."""
Chunk = AnswerChunk | InvalidCallChunk | FinalChunk
"""What a caller of the chat runtime receives; exactly one ``FinalChunk``, at the end."""
