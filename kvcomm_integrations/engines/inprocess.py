"""The in-process engine: vLLM's ``AsyncLLM`` with our connector, started on first use, living in a loop thread."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import multiprocessing
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.base import Delta, Engine, GenerationRequest, TokenLogprob
from kvcomm_integrations.engines.loop import LoopThread
from kvcomm_integrations.engines.progress import engine_start_progress
from kvcomm_integrations.engines.state import Call, StateSummary, clear_state, load_state, save_state, state_place
from kvcomm_integrations.engines.stats import SchedulerSnapshot, StatsKeeper
from kvcomm_integrations.engines.vllm_args import engine_args, require_vllm, sampling_params
from kvcomm_integrations.errors import (
    ContextOverflowError,
    EngineClosedError,
    EngineError,
    EngineForkedError,
    KVCommError,
    RequestRefusedError,
)
from kvcomm_integrations.forks import abandon, watch
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import Mode, RequestReport

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

SHUTDOWN_S = 30.0
"""How long vLLM's processes may take to end before they are killed, seconds."""


class InProcessEngine(Engine):
    """One vLLM engine in this process (its core and workers are subprocesses). Cannot be used in forked children.

    Args:
        config: model, sizes and reuse settings.
    """

    _started_in: ClassVar[int | None] = None
    """Process in which vLLM has been started; in processes forked from it vLLM cannot be started again."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None
        self._llm: AsyncLLM | None = None
        self._tokenizer: ChatTokenizer | None = None
        self._closed = False
        self._stats = StatsKeeper()
        self.repair_refusal: str | None = None
        """Why the repair pass cannot run, once the engine has started."""
        watch(self)

    def after_fork(self) -> None:
        """In a forked child: leave a running engine to the parent, and let nothing end it when the child exits."""
        self._lock = threading.Lock()
        self._stats = StatsKeeper()
        if self._loop is None:
            return
        abandon(self._loop, self._llm)
        self._loop = self._llm = None
        _disown_vllm()

    @property
    def closed(self) -> bool:
        """``close`` has been called; the engine cannot be used again."""
        return self._closed

    @property
    def tokenizer(self) -> ChatTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = ChatTokenizer.from_pretrained(self.config.tokenizer or self.config.model)
            return self._tokenizer

    @property
    def max_model_len(self) -> int:
        return int(self._started().vllm_config.model_config.max_model_len)

    def start(self) -> None:
        """Start the engine now rather than on first use. Idempotent.

        Raises:
            EngineError: it could not start; the message says why.
        """
        self._started()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        if self._llm is None:
            import asyncio

            await asyncio.to_thread(self._started)
        loop = self._thread()
        async with contextlib.aclosing(loop.stream(lambda: self._generate(request))) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield delta

    def generate_sync(self, request: GenerationRequest) -> Iterator[Delta]:
        self._started()
        yield from self._thread().stream_sync(lambda: self._generate(request))

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension on every worker; returns one answer per worker."""
        llm = self._started()
        return list(self._thread().run(llm.collective_rpc(method, args=args)))

    def save_state(self, path: str | Path, *, tenant: str | None = None) -> StateSummary:
        llm = self._started()
        return self._thread().run(save_state(_caller(llm), path, tenant))

    def load_state(self, path: str | Path, *, tenant: str | None = None, merge: bool = False) -> StateSummary:
        llm = self._started()
        return self._thread().run(load_state(_caller(llm), path, tenant, merge=merge))

    def clear_state(self, *, tenant: str | None = None) -> StateSummary:
        llm = self._started()
        return self._thread().run(clear_state(_caller(llm), tenant))

    def reset_prefix_cache(self, *, references: bool = False, corrections: bool = False) -> bool:
        """Empty the exact prefix cache; returns whether it could be emptied.

        Args:
            references: forget our references too.
            corrections: forget what policies have learned; do both after a change of weights.
        """
        llm = self._started()
        if corrections:
            self.clear_state()
        return bool(self._thread().run(llm.reset_prefix_cache(reset_connector=references)))

    @property
    def scheduler_snapshot(self) -> SchedulerSnapshot:
        """vLLM's block usage and queue lengths after its latest step."""
        return self._stats.latest

    def drain(self, timeout: float = 30.0) -> None:
        """Wait until finished requests have been harvested and audited and their blocks are free.

        Raises:
            EngineError: requests still hold blocks after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while self._stats.latest.usage > 0:
            if time.monotonic() > deadline:
                raise EngineError(f"requests still hold blocks after {timeout} s")
            time.sleep(0.01)

    def free_blocks(self) -> int:
        """Blocks of the paged cache that no request holds, after the latest step."""
        total = int(self._started().vllm_config.cache_config.num_gpu_blocks)
        return round(total * (1 - self._stats.latest.usage))

    async def aclose(self) -> None:
        import asyncio

        await asyncio.to_thread(self.close)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            llm, loop, self._llm, self._loop = self._llm, self._loop, None, None
        if loop is None:
            return
        if llm is not None:
            if self.config.state_path and self.config.save_state_on_close:
                _save_last(loop, llm, self.config.state_path)
            loop.run(_shutdown(llm))
        del llm
        atexit.unregister(self.close)
        loop.stop()
        gc.collect()  # vLLM's objects must go now: their finalisers fail once the interpreter shuts down

    # ---- start -----------------------------------------------------------------------------------------------------

    def _thread(self) -> LoopThread:
        self._refuse_in_forked_child()
        loop = self._loop
        if self._closed or loop is None:
            raise EngineClosedError(f"the engine for {self.config.model!r} has been closed; make a new chat model")
        return loop

    def _started(self) -> AsyncLLM:
        self._refuse_in_forked_child()
        with self._lock:
            if self._closed:
                raise EngineClosedError(f"the engine for {self.config.model!r} has been closed; make a new chat model")
            if self._llm is None:
                _refuse_in_spawned_child()
                InProcessEngine._started_in = os.getpid()
                with engine_start_progress(self.config.model):
                    require_vllm()
                    self._loop = self._loop or LoopThread("kvcomm-engine")
                    self._loop.run(self._start())
                    atexit.register(self.close)  # now, so that it runs before what vLLM's imports have registered
            assert self._llm is not None
            return self._llm

    def _refuse_in_forked_child(self) -> None:
        owner = InProcessEngine._started_in
        if owner not in (None, os.getpid()):
            raise EngineForkedError(
                f"the engine for {self.config.model!r} cannot be used in process {os.getpid()}, which was forked from "
                f"process {owner} after vLLM had been started there. Let several processes share a served engine "
                f"(kvcomm serve {self.config.model}, then base_url=...), fork before the first call, or start the "
                'process with multiprocessing.get_context("spawn")'
            )

    async def _start(self) -> None:
        """Start vLLM. Keeps it in no local variable: some import below remembers this frame for good."""
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            self._llm = AsyncLLM.from_engine_args(engine_args(self.config), stat_loggers=[self._stats.factory])
        except KVCommError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM could not start with model {self.config.model!r}: {error}") from error
        stats = await self._llm.collective_rpc("kvcomm_stats")
        self.repair_refusal = next((r["repair_refusal"] for r in stats if r["repair_refusal"]), None)
        await self._warm_start()

    async def _warm_start(self) -> None:
        path = self.config.state_path
        if path is None or self._llm is None or not state_place(path).exists():
            return
        try:
            await load_state(_caller(self._llm), path)
        except KVCommError:  # refused: an engine that silently starts cold would hide it
            llm, self._llm = self._llm, None
            llm.shutdown(timeout=SHUTDOWN_S)
            raise

    # ---- generate --------------------------------------------------------------------------------------------------

    async def _generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Answer a request; one that vLLM ended because a load failed is answered densely instead."""
        async with contextlib.aclosing(self._attempt(request)) as deltas:
            async for delta in deltas:
                if delta.finish_reason != "error":
                    yield delta
                    continue
                if delta.completion_tokens or request.params.mode is Mode.DENSE:
                    raise EngineError("vLLM ended the request with an error; see its log above")
                break
            else:
                return
        dense = replace(request, params=request.params.model_copy(update={"mode": Mode.DENSE}), request_id=None)
        async with contextlib.aclosing(self._attempt(dense)) as deltas:
            async for delta in deltas:
                if delta.finish_reason == "error":
                    raise EngineError("vLLM ended the request with an error, twice; see its log above")
                report = delta.report and delta.report.model_copy(update={"reason": "computed densely after a fault"})
                yield replace(delta, report=report)

    async def _attempt(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        llm = self._llm
        if llm is None:
            raise EngineClosedError(f"the engine for {self.config.model!r} has been closed; make a new chat model")
        limit = int(llm.vllm_config.model_config.max_model_len)
        tokens = len(request.prompt.token_ids)
        if tokens >= limit:
            raise ContextOverflowError(
                f"the prompt has {tokens} tokens; the model {self.config.model!r} takes fewer than {limit} "
                "(max_model_len), answer included: shorten the conversation or raise max_model_len"
            )
        if tokens == 0:
            raise RequestRefusedError("the prompt is empty")
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt.token_ids))
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        params = sampling_params(request, limit)
        request_id = request.request_id or f"kvcomm-{uuid.uuid4().hex}"
        started = time.monotonic()
        ttft: float | None = None
        completion = 0
        try:
            async with contextlib.aclosing(llm.generate(prompt, params, request_id)) as outputs:
                async for output in outputs:
                    ttft = ttft if ttft is not None else (time.monotonic() - started) * 1e3
                    delta = _delta(output, tokens, completion, ttft)
                    completion += len(delta.token_ids)
                    yield delta
        except EngineDeadError as error:
            self._forget_dead(llm)
            raise EngineError(
                f"the vLLM engine for {self.config.model!r} has died; see its log above. The next call starts it anew"
            ) from error
        except EngineGenerateError as error:
            raise EngineError(f"vLLM failed at request {request_id}: {error}") from error
        except ValueError as error:
            raise RequestRefusedError(f"vLLM refused request {request_id}: {error}") from error

    def _forget_dead(self, llm: AsyncLLM) -> None:
        with self._lock:
            if self._llm is llm:
                self._llm = None
        with contextlib.suppress(Exception):
            llm.shutdown()


def _caller(llm: AsyncLLM) -> Call:
    async def call(method: str, *args: Any) -> list[Any]:
        return list(await llm.collective_rpc(method, args=args))

    return call


def _save_last(loop: LoopThread, llm: AsyncLLM, path: str) -> None:
    """Save before the engine goes; a failure must not keep it from going."""
    try:
        loop.run(save_state(_caller(llm), path), timeout=SHUTDOWN_S)
    except Exception:
        logger.exception("What was learned could not be saved to %s", path)


async def _shutdown(llm: AsyncLLM) -> None:
    llm.shutdown(timeout=SHUTDOWN_S)


def _delta(output: RequestOutput, prompt_tokens: int, completion_before: int, ttft_ms: float) -> Delta:
    part = output.outputs[0]
    ids = tuple(part.token_ids)
    last = output.finished
    return Delta(
        text=part.text,
        token_ids=ids,
        logprobs=_logprobs(part.logprobs, ids),
        finish_reason=part.finish_reason if last else None,
        stop_reason=part.stop_reason if last else None,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_before + len(ids),
        cached_tokens=output.num_cached_tokens or 0,
        ttft_ms=ttft_ms if last else None,
        queue_ms=_queue_ms(output.metrics) if last else None,
        report=RequestReport.from_transfer_params(output.kv_transfer_params) if last else None,
    )


def _queue_ms(metrics: Any) -> float | None:
    """Milliseconds from arrival in the scheduler to the first step, by vLLM's own clock."""
    queued, scheduled = getattr(metrics, "queued_ts", 0.0), getattr(metrics, "scheduled_ts", 0.0)
    return max(0.0, (scheduled - queued) * 1e3) if queued and scheduled else None


def _logprobs(steps: Any, ids: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    if not steps:
        return ()
    result = []
    for token, choices in zip(ids, steps, strict=False):
        top = tuple(
            (candidate, entry.decoded_token or "", entry.logprob)
            for candidate, entry in sorted(choices.items(), key=lambda item: -item[1].logprob)
        )
        own = choices[token]
        result.append(TokenLogprob(token, own.decoded_token or "", own.logprob, top))
    return tuple(result)


def _disown_vllm() -> None:
    """Take the parent's processes away from this child's exit handlers: vLLM's and multiprocessing's end them."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = finalizer.peek()
        if alive is not None and str(getattr(alive[1], "__module__", "")).startswith("vllm."):
            finalizer.detach()
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]


def _refuse_in_spawned_child() -> None:
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        main = getattr(sys.modules.get("__main__"), "__file__", "your script")
        raise EngineError(
            f"vLLM starts subprocesses that import {main} again: put the code that calls the model under "
            'if __name__ == "__main__":'
        )
