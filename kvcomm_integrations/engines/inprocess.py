"""The in-process engine: vLLM with the kvcomm connector, started on first use, in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.interface import Delta, Engine, GenerationRequest, check_prompt
from kvcomm_integrations.engines.learned_state import (
    Call,
    StateSummary,
    clear_state,
    load_state,
    save_state,
    state_place,
)
from kvcomm_integrations.engines.loop import LoopThread
from kvcomm_integrations.engines.vllm_args import cpu_environment, engine_args, require_vllm, sampling_params
from kvcomm_integrations.engines.vllm_outputs import SchedulerSnapshot, StatsKeeper, delta_of
from kvcomm_integrations.engines.vllm_processes import (
    claim_process,
    disown_processes,
    refuse_in_forked_child,
    start_progress,
    variables,
)
from kvcomm_integrations.errors import EngineClosedError, EngineError, KVCommError, RequestRefusedError
from kvcomm_integrations.forks import abandon, watch
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import Mode

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs

T = TypeVar("T")
logger = logging.getLogger(__name__)

SHUTDOWN_S = 30.0
"""How long vLLM's processes may take to end before they are killed, seconds."""


class InProcessEngine(Engine):
    """One vLLM engine in this process (its core and workers are subprocesses). Cannot be used in forked children.

    Args:
        config: model, sizes and reuse settings.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None
        self._llm: Any = None
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
        disown_processes()

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

    def context_length(self, *, ask: bool = True) -> int | None:
        llm = self._llm
        return self.config.max_model_len if llm is None else int(llm.vllm_config.model_config.max_model_len)

    def start(self) -> None:
        """Start the engine now rather than on first use. Idempotent.

        Raises:
            EngineError: it could not start; the message says why.
        """
        self._started()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        if self._llm is None:
            await asyncio.to_thread(self._started)
        async with contextlib.aclosing(self._thread().stream(lambda: self._generate(request))) as deltas:
            async for delta in deltas:
                yield delta

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension on every worker; returns one answer per worker."""
        return self._with_workers(lambda call: call(method, *args))

    def save_state(self, path: str | Path, *, tenant: str | None = None) -> StateSummary:
        return self._with_workers(lambda call: save_state(call, path, tenant))

    def load_state(self, path: str | Path, *, tenant: str | None = None, merge: bool = False) -> StateSummary:
        return self._with_workers(lambda call: load_state(call, path, tenant, merge=merge))

    def clear_state(self, *, tenant: str | None = None) -> StateSummary:
        return self._with_workers(lambda call: clear_state(call, tenant))

    def reset_prefix_cache(self, *, references: bool = False, corrections: bool = False) -> bool:
        """Empty the exact prefix cache; returns whether it could be emptied.

        Args:
            references: forget references too.
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

    def _started(self) -> Any:
        """vLLM's ``AsyncLLM``, started if need be."""
        refuse_in_forked_child(self.config.model)
        with self._lock:
            if self._closed:
                raise self._gone()
            if self._llm is None:
                claim_process()
                with start_progress(self.config.model):
                    require_vllm()
                    self._loop = self._loop or LoopThread("kvcomm-engine")
                    self._loop.run(self._start())
                    atexit.register(self.close)  # now, so that it runs before what vLLM's imports have registered
            return self._llm

    async def _start(self) -> None:
        self._start_vllm()
        stats = await self._llm.collective_rpc("kvcomm_stats")
        self.repair_refusal = next((r["repair_refusal"] for r in stats if r["repair_refusal"]), None)
        path = self.config.state_path
        if path is None or not state_place(path).exists():
            return
        try:
            await load_state(_caller(self._llm), path)
        except KVCommError:  # an engine that starts without its state and does not say so would hide it
            llm, self._llm = self._llm, None
            llm.shutdown(timeout=SHUTDOWN_S)
            raise

    def _start_vllm(self) -> None:
        """Start vLLM. Keeps it in no local variable: some import below remembers this frame for good."""
        try:
            from kvcomm_integrations.connector.compat import async_llm, stat_logger

            arguments = self._arguments()
            with variables(cpu_environment(arguments.tensor_parallel_size * arguments.pipeline_parallel_size)):
                self._llm = async_llm(arguments, stat_logger(self._stats.note))
        except KVCommError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM could not start with model {self.config.model!r}: {error}") from error

    def _arguments(self) -> AsyncEngineArgs:
        return engine_args(self.config)

    def _thread(self) -> LoopThread:
        """The loop vLLM lives in, once it has been started."""
        refuse_in_forked_child(self.config.model)
        loop = self._loop
        if self._closed or loop is None:
            raise self._gone()
        return loop

    def _with_workers(self, work: Callable[[Call], Coroutine[Any, Any, T]]) -> T:
        """Run on vLLM's loop what calls the workers."""
        llm = self._started()
        return self._thread().run(work(_caller(llm)))

    def _gone(self) -> EngineClosedError:
        return EngineClosedError(f"the engine for {self.config.model!r} has been closed; make a new chat model")

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
        from vllm import TokensPrompt

        from kvcomm_integrations.connector.compat import engine_errors

        engine_dead, generate_failed = engine_errors()
        llm = self._llm
        if llm is None:
            raise self._gone()
        limit = int(llm.vllm_config.model_config.max_model_len)
        check_prompt(request.prompt, limit, self.config.model)
        tokens = len(request.prompt.token_ids)
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
                    delta = delta_of(output, tokens, completion, ttft)
                    completion += len(delta.token_ids)
                    yield delta
        except engine_dead as error:
            self._forget_dead(llm)
            raise EngineError(
                f"the vLLM engine for {self.config.model!r} has died; see its log above. The next call starts it anew"
            ) from error
        except generate_failed as error:
            raise EngineError(f"vLLM failed at request {request_id}: {error}") from error
        except ValueError as error:
            raise RequestRefusedError(f"vLLM refused request {request_id}: {error}") from error

    def _forget_dead(self, llm: Any) -> None:
        with self._lock:
            if self._llm is llm:
                self._llm = None
        with contextlib.suppress(Exception):
            llm.shutdown()


class PlainEngine(InProcessEngine):
    """The in-process engine with the same arguments but no connector. Its answers carry no report."""

    async def _start(self) -> None:
        self._start_vllm()

    def _arguments(self) -> AsyncEngineArgs:
        arguments = super()._arguments()
        arguments.kv_transfer_config = None
        arguments.worker_extension_cls = ""
        return arguments


def _caller(llm: Any) -> Call:
    async def call(method: str, *args: Any) -> list[Any]:
        return list(await llm.collective_rpc(method, args=args))

    return call


def _save_last(loop: LoopThread, llm: Any, path: str) -> None:
    """Save before the engine goes; a failure must not keep it from going."""
    try:
        loop.run(save_state(_caller(llm), path), timeout=SHUTDOWN_S)
    except Exception:
        logger.exception("What was learned could not be saved to %s", path)


async def _shutdown(llm: Any) -> None:
    llm.shutdown(timeout=SHUTDOWN_S)
