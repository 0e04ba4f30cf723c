"""The one interface every engine implements: a segmented prompt in, deltas of an answer and a report out."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.learned_state import StateSummary
from kvcomm_integrations.engines.loop import sync_loop
from kvcomm_integrations.errors import ContextOverflowError, EngineError, RequestRefusedError
from kvcomm_integrations.ids import tenant_salt
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import KVCommParams, Mode, RequestReport


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn. ``None`` means the engine's default; greedy is ``temperature=0``."""

    max_tokens: int | None = None
    """``None``: until the context is full."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    """Top log-probabilities per generated token."""
    ignore_eos: bool = False
    min_tokens: int = 0
    structured_output: dict[str, Any] | None = None
    """One of vLLM's structured-output forms: ``{"json": schema}``, ``{"regex": ...}``, ``{"choice": [...]}``,
    ``{"grammar": ...}``, ``{"json_object": True}`` or ``{"structural_tag": ...}``."""
    skip_special_tokens: bool = True
    extra_args: dict[str, Any] = field(default_factory=dict)
    """Merged into vLLM's ``SamplingParams.extra_args`` (``kv_transfer_params`` is ours)."""


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue."""

    prompt: SegmentedPrompt
    params: KVCommParams
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    request_id: str | None = None
    """``None``: the engine makes one up."""
    cache_salt: str | None = None
    """Separates the exact prefix cache of tenants."""


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities at one generated position."""

    token_id: int
    token: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """Some more of a growing answer. The last one has ``finish_reason`` set and carries usage and report."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort``."""
    stop_reason: int | str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that vLLM did not compute itself (exact, loaded and repaired)."""
    ttft_ms: float | None = None
    """Milliseconds from hand-over to the first token; on the last delta."""
    queue_ms: float | None = None
    """Milliseconds in the engine's queue before it was scheduled; on the last delta, if the engine knows."""
    report: RequestReport | None = None


class Engine(ABC):
    """Runs one model. Every method may be called from any thread and any event loop."""

    config: EngineConfig

    @property
    @abstractmethod
    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer and chat template. Starts nothing but may read files."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Longest prompt plus answer, tokens. May start the engine."""

    def context_length(self, *, ask: bool = True) -> int | None:
        """Longest prompt plus answer, tokens, as far as that is known without starting anything.

        Args:
            ask: ask a server that has not told yet; waits for its answer.

        Raises:
            EngineError: the server cannot be reached, or serves other models.
        """
        return self.config.max_model_len

    @abstractmethod
    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Stream an answer. Starts the engine on first use. Closing the generator or cancelling the task aborts.

        Raises:
            ContextOverflowError: the prompt does not fit.
            EngineError: the engine could not start, died, or refused the request.
        """

    def generate_sync(self, request: GenerationRequest) -> Generator[Delta, None, None]:
        """``generate`` for callers without an event loop. Closing the generator aborts."""
        return sync_loop().stream_sync(lambda: self.generate(request))

    def save_state(self, path: str | Path, *, tenant: str | None = None) -> StateSummary:
        """Write what the engine has learned to a file, for a warm start or to be merged with other replicas' files.

        Args:
            path: the file, on a file system that every worker sees; replaced at once or not at all.
            tenant: save only this tenant's corrections; ``None``: every tenant's.

        Raises:
            StateFileError: it cannot be written, or this policy's state cannot be kept in a file.
        """
        raise EngineError(f"{type(self).__name__} learns nothing that could be saved")

    def load_state(self, path: str | Path, *, tenant: str | None = None, merge: bool = False) -> StateSummary:
        """Learn what a file holds. Takes effect for the second step after the call.

        Args:
            path: the file.
            tenant: refuse a file that is not this tenant's alone.
            merge: add to what is known instead of replacing it (examples that are in both count twice).

        Raises:
            StateFileError: it is damaged, too large, or of another model, policy or tenant; nothing was changed.
        """
        raise EngineError(f"{type(self).__name__} cannot take in what others have learned")

    def clear_state(self, *, tenant: str | None = None) -> StateSummary:
        """Forget all corrections, or one tenant's."""
        raise EngineError(f"{type(self).__name__} learns nothing that could be forgotten")

    async def arelease_session(self, session: str, *, tenant: str = "default", cache_salt: str | None = None) -> None:
        """Drop what the engine keeps of a session's contents now, rather than after ``session_ttl_s`` of idleness.

        Sends a request of one token; only a request with the session's own tenant and salt can release it.

        Args:
            session: the session that is over.
            tenant: whose session it is.
            cache_salt: prefix-cache salt of its requests; ``None``: the tenant's, as chat models use it.
        """
        params = KVCommParams(session=session, tenant=tenant, mode=Mode.DENSE, release=True)
        sampling = SamplingOptions(max_tokens=1, temperature=0)
        salt = tenant_salt(tenant) if cache_salt is None else cache_salt
        async for _ in self.generate(GenerationRequest(SegmentedPrompt((0,), ()), params, sampling, cache_salt=salt)):
            pass

    def release_session(self, session: str, *, tenant: str = "default", cache_salt: str | None = None) -> None:
        """``arelease_session`` for callers without an event loop."""
        sync_loop().run(self.arelease_session(session, tenant=tenant, cache_salt=cache_salt))

    @abstractmethod
    def close(self) -> None:
        """Shut the engine down, waiting until its processes are gone. Idempotent."""

    async def aclose(self) -> None:
        """``close`` for callers on an event loop."""
        await asyncio.to_thread(self.close)


def check_prompt(prompt: SegmentedPrompt, limit: int, model: str) -> None:
    """Refuse a prompt that no answer can follow.

    Args:
        prompt, model: the prompt, and the model's name.
        limit: longest prompt plus answer, tokens.

    Raises:
        RequestRefusedError: the prompt is empty.
        ContextOverflowError: the prompt leaves no room for an answer.
    """
    tokens = len(prompt.token_ids)
    if tokens == 0:
        raise RequestRefusedError("the prompt is empty")
    if tokens >= limit:
        raise ContextOverflowError(
            f"the prompt has {tokens} tokens; the model {model!r} takes fewer than {limit} (max_model_len), answer "
            "included: shorten the conversation or raise max_model_len"
        )
