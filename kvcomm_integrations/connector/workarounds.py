"""What replaces vLLM's own behaviour, or looks where vLLM offers no way: each with its version and the reason.

Checked with vLLM 0.32 and 0.33. A vLLM that offers the way itself makes the function here unnecessary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from kvcomm_integrations.connector.compat import EngineCoreRequestType, Request, RequestStatus, SamplingParams


def calling_runner() -> Any:
    """The worker's model runner, found among the callers; ``None`` if none of them is one.

    vLLM hands a connector neither the worker nor its model runner, but the runner is who calls
    ``register_kv_caches``. Looking there works for every way of starting vLLM and changes nothing in it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if type(owner).__name__.endswith("ModelRunner"):
            return owner
        frame = frame.f_back
    return None


class EngineCoreAccess:
    """A way into the engine's core for requests of our own, which vLLM offers to front ends only.

    Args:
        core: vLLM's ``EngineCoreProc``.
        scheduler: its scheduler.
    """

    def __init__(self, core: Any, scheduler: Any) -> None:
        self._core = core
        self._scheduler = scheduler
        self._most = scheduler.max_num_scheduled_tokens

    @classmethod
    def of_callers(cls) -> EngineCoreAccess | None:
        """That of the engine core that is being made; ``None`` where there is none, or where it is not for us.

        With several engines in data parallel all of them would have to run along; without chunked prefill a prompt
        cannot be computed in slices; pipelines keep several steps in flight.
        """
        core = scheduler = None
        frame = inspect.currentframe()
        while frame is not None:
            owner = frame.f_locals.get("self")
            names = {base.__name__ for base in type(owner).__mro__}
            core = owner if "EngineCoreProc" in names else core
            scheduler = owner if "SchedulerInterface" in names else scheduler
            frame = frame.f_back
        if core is None or scheduler is None:
            return None
        parallel, chunked = scheduler.parallel_config, scheduler.scheduler_config.enable_chunked_prefill
        alone = parallel.data_parallel_size == 1 and parallel.pipeline_parallel_size == 1
        return cls(core, scheduler) if alone and chunked else None

    @property
    def steps_ahead(self) -> int:
        """Steps that may be under way at a time."""
        return int(getattr(self._core, "batch_queue_size", 1))

    @property
    def open(self) -> bool:
        """The engine takes requests: it is not paused and does not shut down."""
        return self._scheduler.pause_state.name == "UNPAUSED" and bool(self._core.is_running())

    def submit(self, request_id: str, token_ids: list[int], salt: str | None, params: dict[str, Any]) -> None:
        """Have a prompt computed, and one token of an answer that nobody is told. From any thread.

        Args:
            request_id: its name.
            token_ids: the prompt.
            salt: its cache salt.
            params: ``kv_transfer_params``.
        """
        sampling = SamplingParams(temperature=0.0, max_tokens=1, extra_args={"kv_transfer_params": params})
        request = Request(
            request_id, token_ids, sampling, None, cache_salt=salt, block_hasher=self._core.request_block_hasher
        )
        self._core.input_queue.put_nowait((EngineCoreRequestType.ADD, (request, 0)))

    def end(self, request_id: str) -> None:
        """End a request at once; unknown ones are ignored. From the core's own thread."""
        self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def limit_steps(self, tokens: int | None) -> None:
        """Let a step compute at most so many tokens; ``None``: as many as vLLM's configuration says."""
        self._scheduler.max_num_scheduled_tokens = self._most if tokens is None else max(1, min(tokens, self._most))


class RewindableGenerator(torch.Generator):
    """A CPU's random numbers, of which the draws since ``keep`` can be taken back.

    vLLM draws a token for every part of a prompt that is computed in parts, and takes back the draws it did not need,
    by a counter that only a GPU's generators have: on a CPU a request with a seed would end the engine.
    """

    _kept: torch.Tensor

    @classmethod
    def of(cls, generator: torch.Generator) -> RewindableGenerator:
        """One that goes on as ``generator`` would."""
        if isinstance(generator, cls):
            return generator
        new = cls(device=generator.device)
        new.set_state(generator.get_state())
        return new

    def keep(self) -> None:
        """What is drawn from now on may be taken back."""
        self._kept = self.get_state()

    def get_offset(self) -> int:
        """One draw, as a GPU counts it."""
        return 4

    def set_offset(self, offset: int) -> None:
        """Take back what was drawn since ``keep``; the counter itself does not exist."""
        self.set_state(self._kept)


def make_seeds_rewindable(runner: Any) -> None:
    """Prepare a step of a CPU's for seeded requests whose prompts are computed in parts; to be called in every step."""
    batch: Any = getattr(runner, "input_batch", None)
    for index, generator in list(getattr(batch, "generators", {}).items()):
        if generator.device.type == "cpu":
            rewindable = RewindableGenerator.of(generator)
            rewindable.keep()
            batch.generators[index] = runner.requests[batch.req_ids[index]].generator = rewindable


def step_being_taken_in() -> Any:
    """What the workers have said of the step whose results vLLM's scheduler is taking in; ``None`` outside of that.

    The scheduler ends the requests that a step has finished before it hands the workers' words to the connector, so a
    request that ends with its first token would be reported without them. They are in the hands of the caller.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "update_from_output":
            return getattr(frame.f_locals.get("kv_connector_output"), "kv_connector_worker_meta", None)
        frame = frame.f_back
    return None


def watch_weights(runner: Any, changed: Callable[[bool], None]) -> None:
    """Have ``changed`` called whenever the weights of a running engine have been replaced, wholly or in part.

    vLLM tells connectors nothing of it. But it replaces weights by the runner's ``reload_weights``, and it ends both
    that and a transfer of weights from a trainer with the runner's ``reset_lora_state``.

    Args:
        runner: the worker's model runner; what it lacks is not watched.
        changed: told whether the weights now are those of the folder that ``model_config.model`` names.
    """
    reload, reset = getattr(runner, "reload_weights", None), getattr(runner, "reset_lora_state", None)

    def reloading(*args: Any, **kwargs: Any) -> Any:
        named = False
        try:
            result = reload(*args, **kwargs)  # type: ignore[misc]
            named = (args[0] if args else kwargs.get("weights_iterator")) is None
            return result
        finally:  # a reload that failed may have replaced some of them
            changed(named)

    def resetting() -> None:
        reset()  # type: ignore[misc]
        changed(False)

    if reload is not None:
        runner.reload_weights = reloading
    if reset is not None:
        runner.reset_lora_state = resetting
