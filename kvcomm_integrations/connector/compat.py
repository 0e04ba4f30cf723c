"""All private modules of vLLM that the package imports from, apart from what `workarounds` patches.

Written against vLLM 0.32 and 0.33: what a new release changes is met here and in `workarounds`; a test keeps private
names out of all other modules, and `contract` lists what is relied upon. Importing it imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvcomm_integrations.connector.contract import shortcoming, unusable
from kvcomm_integrations.reuse.transfers import to_device

try:
    import vllm
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.distributed.parallel_state import (
        get_pp_group,
        get_tensor_model_parallel_rank,
        get_tp_group,
        model_parallel_is_initialized,
    )
    from vllm.forward_context import (
        ForwardContext,
        get_forward_context,
        is_forward_context_available,
        set_forward_context,
    )
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request, RequestStatus
except ImportError as error:  # whoever loads the connector, vLLM for one, should see one clear error
    raise unusable(error) from error

__all__ = [
    "EngineCoreRequestType",
    "ForwardContext",
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
    "SamplingParams",
    "SchedulerOutput",
    "VllmConfig",
    "get_forward_context",
    "is_forward_context_available",
    "set_forward_context",
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
    if lacking := shortcoming(vllm.__version__):
        return lacking
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


def cached_blocks(manager: Any, hashes: Sequence[Any]) -> int:
    """How many of these blocks, from the first on, the prefix cache holds.

    Args:
        manager: vLLM's ``KVCacheManager``, of one group of layers.
        hashes: of a request's full blocks.
    """
    pool = manager.block_pool
    return next((n for n, value in enumerate(hashes) if not pool.get_cached_block(value, [0])), len(hashes))


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


def holds_first_layer() -> bool:
    """Whether this worker's layers begin with the model's; later stages of a pipeline's do not."""
    return not model_parallel_is_initialized() or bool(get_pp_group().is_first_rank)


def is_second_generation(runner: Any) -> bool:
    """Whether a model runner is of the generation that vLLM uses wherever there is Triton."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    return isinstance(runner, GPUModelRunner)


def repair_refusal(runner: Any) -> str | None:
    """Why the repair pass cannot run on this model runner, of either generation, or ``None`` if it can."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as FirstGeneration

    if runner is None:
        return "no model runner registered the paged cache"
    second = is_second_generation(runner)
    if not second and not isinstance(runner, FirstGeneration):
        return f"the model runner {type(runner).__module__}.{type(runner).__name__} is not known"
    if runner.vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline parallelism is on"
    if len(runner.attn_groups) != 1 or len(runner.attn_groups[0]) != 1:
        return "the model has more than one attention group"
    if runner.attn_groups[0][0].kernel_block_size is not None:
        return "the attention kernel's blocks are smaller than the cache's"
    if second and type(runner.model_state) is not DefaultModelState:
        return f"the model keeps a state of its own ({type(runner.model_state).__name__})"
    if runner.vllm_config.parallel_config.use_ubatching:
        return "steps are cut into micro-batches"
    if (runner.model_state.rope_state is not None) if second else runner.uses_mrope:
        return "the model uses multimodal rotary positions"
    return None


def add_metadata_builder(runner: Any) -> None:
    """Give the runner's attention group one more builder of metadata, as vLLM does for each micro-batch.

    It is for our own forwards: captured graphs read what the engine's own builder keeps, so nobody else may use that
    between the making of a step's metadata and its forward.
    """
    group = runner.attn_groups[0][0]
    engines = group.get_metadata_builder()
    own = type(engines)(engines.kv_cache_spec, group.layer_names, runner.vllm_config, runner.device)
    if hasattr(own, "set_workspace_buffer"):  # scratch memory, which forwards use one after the other
        own.set_workspace_buffer(engines._get_workspace_buffer())
    group.metadata_builders.append(own)


def attention_metadata(
    runner: Any,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None,
) -> Any:
    """Metadata for the attention over rows of our own, by the builder that is ours where there is one.

    Args:
        runner: the worker's model runner.
        query_starts: ``(rows + 1,)`` int32 in host memory, ending with the number of tokens.
        seq_lens: ``(rows,)`` int32 in host memory.
        tables: ``(rows, blocks)`` int32 on the device.
        slots: ``(tokens,)`` int64 on the device. Block tables that vLLM holds have a row for each request, ours one for
            each gap: its own slot mapping cannot tell them.
        positions: ``(tokens,)`` int64 on the device, or not known.
    """
    rows, tokens = len(seq_lens), int(query_starts[-1])
    longest, most = int(query_starts.diff().max()), int(seq_lens.max())
    on_device = to_device(query_starts, tables.device), to_device(seq_lens, tables.device)
    prefilling = torch.ones(rows, dtype=torch.bool)
    if is_second_generation(runner):
        from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

        by_layer = build_attn_metadata(
            attn_groups=runner.attn_groups,
            num_reqs=rows,
            num_tokens=tokens,
            query_start_loc_gpu=on_device[0],
            query_start_loc_cpu=query_starts,
            max_query_len=longest,
            seq_lens=on_device[1],
            max_seq_len=most,
            block_tables=(tables,),
            slot_mappings=slots.unsqueeze(0),
            kv_cache_config=runner.kv_cache_config,
            seq_lens_cpu_upper_bound=seq_lens,
            positions=positions,
            is_prefilling=prefilling,
            ubatch_idx=-1,
        )
        return next(iter(by_layer.values()))
    common = CommonAttentionMetadata(
        query_start_loc=on_device[0],
        query_start_loc_cpu=query_starts,
        seq_lens=on_device[1],
        num_reqs=rows,
        num_actual_tokens=tokens,
        max_query_len=longest,
        max_seq_len=most,
        block_table_tensor=tables,
        slot_mapping=slots,
        causal=True,
        positions=positions,
        seq_lens_cpu_upper_bound=seq_lens,
        is_prefilling=prefilling,
    )
    return runner.attn_groups[0][0].get_metadata_builder(-1).build(0, common)


def request_refusal(request: Request) -> str:
    """Why a request of this kind runs densely; empty if it need not."""
    if request.lora_request is not None:
        return "LoRA requests are served densely"
    if request.mm_features or request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "multimodal and embedding prompts are served densely"
    if request.resumable:
        return "streaming-input requests are served densely"
    if request.skip_reading_prefix_cache:
        return "the request asked to skip cached KV (prompt logprobs do)"
    return ""


# ---- the engine's front end and its parsers: imported when asked for, workers need none of it --------------------


def async_llm(arguments: Any, stat_logger: Any) -> Any:
    """Start vLLM's engine; its core and workers are subprocesses.

    Args:
        arguments: ``AsyncEngineArgs``.
        stat_logger: makes a statistics logger from vLLM's configuration and an engine's number.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(arguments, stat_loggers=[stat_logger])


def engine_errors() -> tuple[type[Exception], type[Exception]]:
    """What vLLM raises when the engine has died, and when one request failed."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    return EngineDeadError, EngineGenerateError


def stat_logger(note: Callable[[Any], None]) -> Any:
    """A class of statistics loggers that hands each step's ``SchedulerStats`` to ``note``."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Logger(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            del vllm_config, engine_index

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is not None:
                note(scheduler_stats)

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

    return Logger


def parser_class(tool_parser: str | None, reasoning_parser: str | None) -> Any:
    """The class that reads answers by vLLM's parsers of these names.

    Raises:
        TypeError, KeyError, ImportError: there is no such parser.
    """
    from vllm.parser import ParserManager

    return ParserManager.get_parser(
        tool_parser_name=tool_parser, reasoning_parser_name=reasoning_parser, enable_auto_tools=True
    )


def chat_completion_request(fields: dict[str, Any]) -> Any:
    """The request of vLLM's chat endpoint, which its parsers want to see."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(**fields)
