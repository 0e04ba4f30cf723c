"""Every vLLM name that is not public API, in one place: a new vLLM release touches this file and no other.

Written against vLLM 0.32 and 0.33. Importing it imports vLLM; only `connector` and `engines` may do so.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group, get_tp_group, model_parallel_is_initialized
from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
    set_forward_context,
)
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvcomm_integrations.reuse.transfers import to_device

__all__ = [
    "BlockHasher",
    "CommonAttentionMetadata",
    "KVCacheConfig",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "Request",
    "RequestStatus",
    "RewindableGenerator",
    "SchedulerOutput",
    "VirtualBatch",
    "VllmConfig",
    "agree_on_faults",
    "attention_layers",
    "block_hasher",
    "cache_bytes_per_token",
    "calling_runner",
    "current_connector",
    "hash_block_size",
    "holds_first_layer",
    "logits_of",
    "make_seeds_rewindable",
    "rank_heads",
    "rehash",
    "repair_refusal",
    "unsupported_reason",
    "virtual_batch",
    "watch_weights",
    "write_with_engine",
]

BlockHasher = Callable[[Request], list[Any]]
"""Computes the hashes of a request's full blocks that have none yet."""


def current_connector() -> KVConnectorBase_V1 | None:
    """The worker's connector of this process, if there is one."""
    return get_kv_transfer_group() if has_kv_transfer_group() else None


def unsupported_reason(config: VllmConfig, cache: KVCacheConfig) -> str | None:
    """Why KV of this model cannot be reused, or ``None`` if it can.

    Only full attention over one group of equal layers is understood; everything else is served densely.
    """
    model = config.model_config
    if not cache.kv_cache_groups:
        return "the model keeps no KV cache (encoders and embedding models have none)"
    if len(cache.kv_cache_groups) != 1:
        return f"the model has {len(cache.kv_cache_groups)} KV-cache groups (hybrid attention); only one is supported"
    spec = cache.kv_cache_groups[0].kv_cache_spec
    if isinstance(spec, MLAAttentionSpec):
        return "the model uses multi-head latent attention (MLA)"
    if type(spec) is not FullAttentionSpec:
        return f"the model's cache is of kind {type(spec).__name__}; only full attention is supported"
    if spec.sliding_window is not None or getattr(spec, "attention_chunk_size", None) is not None:
        return "the model uses sliding-window or chunked attention"
    if getattr(model.hf_text_config, "sliding_window", None) and getattr(
        model.hf_text_config, "use_sliding_window", True
    ):
        return f"the model uses a sliding window of {model.hf_text_config.sliding_window} tokens"
    if config.cache_config.cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
        return f"the KV cache is quantised ({config.cache_config.cache_dtype})"
    if config.speculative_config is not None:
        return "speculative decoding is on"
    parallel = config.parallel_config
    if (
        getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        return "context parallelism is on"
    return None


def hash_block_size(config: VllmConfig, cache: KVCacheConfig) -> int:
    """Tokens that one entry of ``request.block_hashes`` stands for."""
    size = getattr(config.cache_config, "hash_block_size", None)
    return int(size or cache.kv_cache_groups[0].kv_cache_spec.block_size)


def cache_bytes_per_token(cache: KVCacheConfig) -> int:
    """Bytes of one token's KV over all layers of one worker; 0 for models without a KV cache."""
    total = 0
    for group in cache.kv_cache_groups:
        spec = group.kv_cache_spec
        total += len(group.layer_names) * spec.page_size_bytes // spec.block_size
    return total


def rank_heads(config: VllmConfig) -> tuple[int, int]:
    """First KV head of this worker and how many it has; ranks beyond the model's heads hold copies."""
    ranks = config.parallel_config.tensor_parallel_size
    heads = config.model_config.get_total_num_kv_heads()
    return get_tensor_model_parallel_rank() * heads // ranks, max(1, heads // ranks)


def block_hasher(request: Request) -> BlockHasher | None:
    """What computes a request's block hashes; ``None`` where prefix caching is off."""
    hasher: BlockHasher | None = request._block_hasher
    return hasher


def rehash(request: Request, keep: int, hasher: BlockHasher) -> None:
    """Keep the first ``keep`` block hashes of a request and compute all later ones with ``hasher`` from now on."""
    request._block_hasher = hasher
    del request.block_hashes[keep:]
    request.update_block_hashes()


def agree_on_faults(faults: list[str]) -> list[str]:
    """What went wrong on any of the tensor-parallel ranks, so that all of them run the same repair pass.

    All ranks must call it with lists of equal length. One small exchange between the processes, none on a single rank.
    """
    if not (model_parallel_is_initialized() and get_tp_group().world_size > 1):
        return faults
    bad = torch.tensor([bool(fault) for fault in faults], dtype=torch.int32)
    torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX, group=get_tp_group().cpu_group)
    return [
        fault or ("another rank failed" if other else "") for fault, other in zip(faults, bad.tolist(), strict=True)
    ]


def attention_layers(config: VllmConfig) -> dict[str, Any]:
    """Attention layers of this worker by name (values are vLLM ``Attention`` modules)."""
    return dict(config.compilation_config.static_forward_context)


def write_with_engine(
    layer: Any, cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write KV of ``slots`` through the attention backend's own operation.

    Args:
        layer: attention layer whose backend writes.
        cache: the layer's paged cache.
        keys: rotated keys ``(tokens, kv_heads, head_dim)``; ``values`` alike.
        slots: ``(tokens,)`` int64, block number times block size plus offset.
    """
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)


def virtual_batch(
    runner: Any,
    *,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    query_starts: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Iterable[int]],
) -> VirtualBatch:
    """Prepare to compute rows of an own making, whose KV is written into the paged cache.

    Row ``i`` holds the query tokens ``query_starts[i]:query_starts[i + 1]`` of a sequence whose first ``seq_lens[i]``
    tokens lie in ``block_tables[i]``. Every layer writes the KV of all rows before it attends, so rows that belong to
    the same sequence see one another. Logits are not computed. Nothing here waits for another rank; the forward does.

    Args:
        runner: the worker's model runner (first generation).
        token_ids, positions, slots: ``(tokens,)`` int64, of all rows one after another.
    """
    return VirtualBatch(
        runner,
        to_device(token_ids, runner.device),
        to_device(positions, runner.device),
        _Rows(
            torch.tensor(list(query_starts), dtype=torch.int32),
            torch.tensor(list(seq_lens), dtype=torch.int32),
            _padded([list(table) for table in block_tables]),
            slots,
        ),
    )


class _Rows(NamedTuple):
    """Sequences of one batch as attention sees them, in host memory."""

    query_starts: torch.Tensor
    """``(rows + 1,)`` int32, ending with the number of tokens."""
    seq_lens: torch.Tensor
    tables: torch.Tensor
    """``(rows, blocks)`` int32; what is beyond a row's blocks does not matter."""
    slots: torch.Tensor
    """``(tokens,)`` int64."""

    def followed_by(self, other: _Rows) -> _Rows:
        """One batch of both."""
        return _Rows(
            torch.cat([self.query_starts, self.query_starts[-1] + other.query_starts[1:]]),
            torch.cat([self.seq_lens, other.seq_lens]),
            _padded([*self.tables.tolist(), *other.tables.tolist()]),
            torch.cat([self.slots, other.slots]),
        )


class VirtualBatch:
    """Rows that are ready to be computed, once: in a forward of their own, or in the one that the step is about to run.

    All ranks must do the same with theirs.

    Args:
        runner: the worker's model runner.
        token_ids, positions: ``(tokens,)`` int64, on the device.
        rows: whose tokens they are.
    """

    def __init__(self, runner: Any, token_ids: torch.Tensor, positions: torch.Tensor, rows: _Rows) -> None:
        self._runner = runner
        self._ids = token_ids
        self._positions = positions
        self._rows = rows
        self._metadata, self._slots = self._attention(rows, positions)

    def __call__(self) -> torch.Tensor:
        """Run a forward of their own.

        Returns:
            the last layer's hidden states, ``(tokens, hidden)``.
        """
        with self.step():
            return self.forward()

    @contextmanager
    def step(self) -> Iterator[None]:
        """The step whose forward computes these rows."""
        names, tokens = self._layers(), self._ids.numel()
        with (
            torch.inference_mode(),
            set_forward_context(
                dict.fromkeys(names, self._metadata),
                self._runner.vllm_config,
                num_tokens=tokens,
                slot_mapping=dict.fromkeys(names, self._slots),
                is_padding=torch.zeros(tokens, dtype=torch.bool, device=self._ids.device),
            ),
        ):
            yield

    def forward(self) -> torch.Tensor:
        """The forward of that step; result as of a call."""
        hidden: torch.Tensor = self._runner.model(input_ids=self._ids, positions=self._positions)
        return hidden

    def join(self, done: Callable[[float], None]) -> bool:
        """Have the step's own forward, which is about to run, compute these rows with its own: all weights are read
        once instead of twice. The result is the same to rounding, as in any batch of the engine's. Only on a CPU
        without compilation, where a step's rows are neither padded nor captured.

        Args:
            done: told afterwards how many milliseconds that took, in proportion to the tokens.

        Returns:
            whether it will; if not, nothing has happened.
        """
        step = _step_context(self._runner)
        total = self._ids.numel() + (step.tokens if step is not None else 0)
        if step is None or total > self._most_tokens():
            return False
        metadata, slots = self._attention(step.rows.followed_by(self._rows), None)
        names, model = self._layers(), self._runner.model
        padding = torch.zeros(total, dtype=torch.bool)
        hooks: list[Any] = []
        started = 0.0

        def enter(module: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            nonlocal started
            if not step.current():  # that forward never came
                leave()
                return None
            if given.get("inputs_embeds") is not None or given.get("input_ids") is None:  # those have no ids to add to
                leave()
                started = time.perf_counter()
                self()
                done((time.perf_counter() - started) * 1e3)
                return None
            step.put(_Shape(dict.fromkeys(names, metadata), dict.fromkeys(names, slots), padding))
            started = time.perf_counter()
            ids = torch.cat([given["input_ids"][: step.tokens], self._ids])
            positions = torch.cat([given["positions"][: step.tokens], self._positions])
            return args, given | {"input_ids": ids, "positions": positions}

        def finish(module: Any, args: Any, hidden: torch.Tensor) -> torch.Tensor:
            leave()
            step.put(step.shape)
            done((time.perf_counter() - started) * 1e3 * self._ids.numel() / total)
            return hidden[: step.tokens]

        def leave() -> None:
            while hooks:
                hooks.pop().remove()

        hooks.append(model.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(model.register_forward_hook(finish))
        return True

    def _layers(self) -> list[str]:
        return list(self._runner.kv_cache_config.kv_cache_groups[0].layer_names)

    def _most_tokens(self) -> int:
        """What vLLM has made sure of that it fits into memory."""
        return int(self._runner.vllm_config.scheduler_config.max_num_batched_tokens)

    def _attention(self, rows: _Rows, positions: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
        """Metadata for the attention over some rows, by the runner's own builder, and their slots on the device."""
        device = self._runner.device
        slots = to_device(rows.slots, device)
        common = CommonAttentionMetadata(
            query_start_loc=to_device(rows.query_starts, device),
            query_start_loc_cpu=rows.query_starts,
            seq_lens=to_device(rows.seq_lens, device),
            num_reqs=len(rows.seq_lens),
            num_actual_tokens=int(rows.query_starts[-1]),
            max_query_len=int(rows.query_starts.diff().max()),
            max_seq_len=int(rows.seq_lens.max()),
            block_table_tensor=to_device(rows.tables, device),
            slot_mapping=slots,
            causal=True,
            positions=positions,
            seq_lens_cpu_upper_bound=rows.seq_lens,
            is_prefilling=torch.ones(len(rows.seq_lens), dtype=torch.bool),
        )
        return self._runner.attn_groups[0][0].get_metadata_builder().build(0, common), slots


def _padded(tables: list[list[int]]) -> torch.Tensor:
    """Block tables as one ``(rows, blocks)`` int32 tensor."""
    padded = torch.zeros((len(tables), max(map(len, tables))), dtype=torch.int32)
    for row, blocks in enumerate(tables):
        padded[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    return padded


class _Shape(NamedTuple):
    """What a forward's context says of its tokens, under the names it has there."""

    attn_metadata: Any
    slot_mapping: Any
    is_padding: Any


@dataclass(frozen=True)
class _Step:
    """The forward that vLLM is about to run."""

    context: ForwardContext
    shape: _Shape
    """What the context holds of itself."""
    rows: _Rows

    @property
    def tokens(self) -> int:
        return len(self.rows.slots)

    def current(self) -> bool:
        """Its context is the one in force."""
        return is_forward_context_available() and get_forward_context() is self.context

    def put(self, shape: _Shape) -> None:
        """Make the context say something else."""
        for name, value in shape._asdict().items():
            setattr(self.context, name, value)


def _step_context(runner: Any) -> _Step | None:
    """The forward in whose context this is called, if rows can be added to it."""
    eager = runner.vllm_config.model_config.enforce_eager  # what is compiled or captured may be so for certain sizes
    if torch.device(runner.device).type != "cpu" or not eager or not is_forward_context_available():
        return None
    context = get_forward_context()
    shape = _Shape(context.attn_metadata, context.slot_mapping, context.is_padding)
    if not isinstance(shape.attn_metadata, dict) or not shape.attn_metadata:
        return None
    if context.ubatch_slices is not None or context.dp_metadata is not None:
        return None
    own = next(iter(shape.attn_metadata.values()))
    tokens = own.num_actual_tokens
    padded = shape.is_padding is None or len(shape.is_padding) != tokens
    if padded or own.causal is not True or int(own.query_start_loc[-1]) != tokens:
        return None
    rows = _Rows(own.query_start_loc, own.seq_lens, own.block_table, own.slot_mapping[:tokens])
    return _Step(context, shape, rows)


def logits_of(runner: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    """Logits ``(tokens, vocabulary)`` of hidden states; ``None`` on ranks without them. All ranks must call."""
    with torch.inference_mode():
        logits: torch.Tensor | None = runner.model.compute_logits(hidden)
        return logits


def holds_first_layer() -> bool:
    """Whether this worker's layers begin with the model's; later stages of a pipeline's do not."""
    return not model_parallel_is_initialized() or bool(get_pp_group().is_first_rank)


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


def repair_refusal(runner: Any) -> str | None:
    """Why the repair pass cannot run on this model runner, or ``None`` if it can."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if runner is None:
        return "no model runner registered the paged cache"
    if not isinstance(runner, GPUModelRunner):
        return f"the model runner {type(runner).__module__}.{type(runner).__name__} is not known"
    if runner.vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline parallelism is on"
    if len(runner.attn_groups) != 1 or len(runner.attn_groups[0]) != 1:
        return "the model has more than one attention group"
    if runner.uses_mrope:
        return "the model uses multimodal rotary positions"
    return None
