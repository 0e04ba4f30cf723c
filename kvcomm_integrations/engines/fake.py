"""An engine without a model, for tests: answers come from a script, everything else behaves like a real engine.

Streams small deltas, stops at stop strings and ``max_tokens``, counts usage, reports the reuse that a real engine would
plan, and can be slow, fail or be aborted. Needs a tokenizer's files; no torch, no vLLM.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.interface import Delta, Engine, GenerationRequest, TokenLogprob, check_prompt
from kvcomm_integrations.engines.schema_examples import example_text
from kvcomm_integrations.errors import EngineClosedError
from kvcomm_integrations.forks import watch
from kvcomm_integrations.planning.forecast import PlanForecast
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer

Answer = str | Sequence[int] | Exception | None
Script = Callable[[GenerationRequest], Answer] | Sequence[Answer] | Answer
"""What to answer: a text, token ids, an error to raise, ``None`` for an answer that follows the request's structured
output ("ok" if there is none), a list of these used up in order (the last repeats), or a function of the request."""


class FakeEngine(Engine):
    """Answers from a script.

    Args:
        tokenizer: A chat tokenizer, or the folder or hub id to load one from.
        script: What to answer, see ``Script``.
        config: Configuration to report; ``None``: defaults with the tokenizer's name as model.
        max_model_len: Longest prompt plus answer, tokens.
        delta_tokens: Tokens per delta.
        latency: Seconds before the first delta.
        token_latency: Seconds before each further delta.

    Attributes:
        requests: Every request received, in order.
        aborted: Requests whose stream was closed or cancelled before its end.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer | str | Path,
        script: Script = None,
        *,
        config: EngineConfig | None = None,
        max_model_len: int = 8192,
        delta_tokens: int = 2,
        latency: float = 0.0,
        token_latency: float = 0.0,
    ) -> None:
        name = "fake"
        if isinstance(tokenizer, (str, Path)):
            name = str(tokenizer)
            tokenizer = ChatTokenizer.from_pretrained(name)
        self._tokenizer = tokenizer
        self.config = config or EngineConfig(model=name, max_model_len=max_model_len)
        self._script = script
        self._used = 0
        self._max_model_len = max_model_len
        self._delta_tokens = delta_tokens
        self._latency = latency
        self._token_latency = token_latency
        self._forecast = PlanForecast(self.config.reuse)
        self._lock = threading.Lock()
        self._closed = False
        self.requests: list[GenerationRequest] = []
        self.aborted: list[GenerationRequest] = []
        watch(self)

    def after_fork(self) -> None:
        """In a forked child: a lock that no thread of the parent holds."""
        self._lock = threading.Lock()

    @property
    def tokenizer(self) -> ChatTokenizer:
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    def context_length(self, *, ask: bool = True) -> int | None:
        return self._max_model_len

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        plan, finished = self._plan(request), False
        try:
            for i, delta in enumerate(plan):
                await asyncio.sleep(self._token_latency if i else self._latency)
                finished = delta.finish_reason is not None
                yield delta
        finally:
            if not finished:
                self.aborted.append(request)

    def close(self) -> None:
        self._closed = True

    def _plan(self, request: GenerationRequest) -> list[Delta]:
        with self._lock:
            if self._closed:
                raise EngineClosedError("the fake engine has been closed; make a new one")
            self.requests.append(request)
            answer = self._answer(request)
            if isinstance(answer, Exception):
                raise answer
            check_prompt(request.prompt, self._max_model_len, self.config.model)
            deltas = self._deltas(request, answer)
            said = [token for delta in deltas for token in delta.token_ids]
            ended = bool(said) and said[-1] in self._tokenizer.eos_token_ids
            prompt, answered = request.prompt.token_ids, said[:-1] if ended else said
            report = self._forecast.next(request.params, prompt, cache_salt=request.cache_salt, answer=answered)
        deltas[-1] = replace(
            deltas[-1],
            prompt_tokens=len(prompt),
            completion_tokens=len(said),
            cached_tokens=report.prompt_tokens - report.computed,
            ttft_ms=1000 * self._latency,
            report=report,
        )
        return deltas

    def _answer(self, request: GenerationRequest) -> str | Sequence[int] | Exception:
        script = self._script
        if callable(script):
            answer = script(request)
        elif isinstance(script, (list, tuple)) and not (script and isinstance(script[0], int)):
            answer = script[min(self._used, len(script) - 1)] if script else None
            self._used += 1
        else:
            answer = script  # type: ignore[assignment]
        if answer is not None:
            return answer
        constraint = request.sampling.structured_output
        return example_text(constraint) if constraint else "ok"

    def _deltas(self, request: GenerationRequest, answer: str | Sequence[int]) -> list[Delta]:
        """An answer in slices. Text that might still become a stop string, or half a character, is held back."""
        sampling, eos = request.sampling, self._tokenizer.eos_token_ids
        ids = list(self._tokenizer.encode(answer, allow_special=True) if isinstance(answer, str) else answer)
        room = self._max_model_len - len(request.prompt.token_ids)
        limit = min(room, sampling.max_tokens) if sampling.max_tokens is not None else room
        finish, stop_reason = "stop", None
        if len(ids) >= limit:
            ids, finish = ids[:limit], "length"
        elif eos:
            ids.append(min(eos))
        deltas: list[Delta] = []
        sent = 0
        hold = max(map(len, sampling.stop), default=1) - 1
        for start in range(0, len(ids), self._delta_tokens):
            end = min(start + self._delta_tokens, len(ids))
            ended = end == len(ids)
            shown = ids[: end - 1] if ids[end - 1] in eos and ended else ids[:end]
            text = self._tokenizer.decode(shown)
            found = [(at, place) for place, stop in enumerate(sampling.stop) if (at := text.find(stop)) >= 0]
            if found:
                at, place = min(found)
                text, ended, finish, stop_reason = text[:at], True, "stop", sampling.stop[place]
            safe = len(text) if ended else max(sent, len(text.rstrip("\ufffd")) - hold)
            part = tuple(ids[start:end])
            deltas.append(
                Delta(
                    text=text[sent:safe],
                    token_ids=part,
                    logprobs=() if sampling.logprobs is None else self._logprobs(part, sampling.logprobs),
                    finish_reason=finish if ended else None,
                    stop_reason=stop_reason if ended else None,
                )
            )
            sent = safe
            if ended:
                return deltas
        return deltas or [Delta(finish_reason=finish)]

    def _logprobs(self, token_ids: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
        choices = ((token_id, self._tokenizer.decode([token_id]), -0.5) for token_id in token_ids)
        return tuple(TokenLogprob(*choice, (choice,) * min(1, count)) for choice in choices)
