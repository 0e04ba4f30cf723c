"""Our settings and requests as vLLM's arguments. Importing it does not import vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.connector.contract import SUPPORTED_VLLM
from kvcomm_integrations.engines.interface import GenerationRequest
from kvcomm_integrations.errors import ConfigurationError, MissingDependencyError

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs, SamplingParams

CONNECTOR = "KVCommConnector"
WORKER_EXTENSION = "kvcomm_integrations.connector.worker_extension.KVCommWorkerExtension"
OWN_ARGUMENTS = ("kv_transfer_config", "worker_extension_cls", "model")
"""Arguments of vLLM that users do not set: kvcomm does."""
CPU_CACHE_BYTES = 2 << 30
"""Paged cache on a CPU where the user says nothing else. vLLM would take nine tenths of the machine's memory, and not
start where less is free; the references need some of it too."""
CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
RESERVED_VARIABLE = "VLLM_CPU_NUM_OF_RESERVED_CPU"
BINDING_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"


def require_vllm() -> str:
    """Import vLLM quietly and check its version.

    Returns:
        the version.

    Raises:
        MissingDependencyError: vLLM is not installed.
        ConfigurationError: the version is not supported.
    """
    for name, value in {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        raise MissingDependencyError(
            f"vLLM cannot be imported ({error}); install kvcomm-integrations[vllm] on a GPU machine or "
            "kvcomm-integrations[cpu] on a CPU"
        ) from error
    check_version(vllm.__version__)
    return str(vllm.__version__)


def check_version(version: str) -> None:
    """Refuse versions of vLLM that the package was not written for.

    Raises:
        ConfigurationError: the version is not supported.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    low, high = SUPPORTED_VLLM
    if not low <= numbers < high:
        raise ConfigurationError(
            f"vLLM {version} is not supported; install a version from {low[0]}.{low[1]} on and below "
            f"{high[0]}.{high[1]}"
        )


def connector_config(reuse: ReuseConfig) -> dict[str, Any]:
    """The fields of vLLM's ``KVTransferConfig`` that put our connector in place."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "kvcomm_integrations.connector.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": reuse.model_dump(mode="json"),
    }


def cpu_defaults() -> dict[str, Any]:
    """Arguments of vLLM on a CPU where the user says nothing else: no compilation, which takes minutes at the start."""
    cache = {} if CACHE_VARIABLE in os.environ else {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
    return {"enforce_eager": True, **cache}


def cpu_environment(ranks: int) -> dict[str, str]:
    """Variables that give vLLM's workers on a CPU as many cores as they have without a connector.

    vLLM keeps one core for each worker free for its scheduler, and one more where a connector is configured, which ours
    has no use for. Empty where the user has chosen, and where the machine has so few cores that vLLM keeps none.

    Args:
        ranks: workers on this machine.
    """
    chosen = RESERVED_VARIABLE in os.environ or os.environ.get(BINDING_VARIABLE, "auto") != "auto"
    return {} if chosen or physical_cores() <= 2 * ranks else {RESERVED_VARIABLE: str(ranks)}


def physical_cores() -> int:
    """Physical cores that this process may run on."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = Path("/sys/devices/system/cpu")
    cores = {
        file.read_text() if (file := siblings / f"cpu{number}/topology/thread_siblings_list").exists() else str(number)
        for number in allowed
    }
    return len(cores)


def engine_args(config: EngineConfig) -> AsyncEngineArgs:
    """vLLM's engine arguments for a configuration, with our connector and worker extension.

    Raises:
        ConfigurationError: ``engine_args`` names a field that vLLM does not have or that we set ourselves.
    """
    require_vllm()
    from vllm import AsyncEngineArgs
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    kwargs: dict[str, Any] = {
        "model": config.model,
        "dtype": config.dtype,
        "seed": config.seed,
        "tensor_parallel_size": config.tensor_parallel_size,
        "kv_transfer_config": KVTransferConfig(**connector_config(config.reuse)),
        "worker_extension_cls": WORKER_EXTENSION,
    }
    optional = {
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "tokenizer": config.tokenizer,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.enforce_eager,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
    }
    kwargs.update(cpu_defaults() if current_platform.is_cpu() else {})
    kwargs.update({name: value for name, value in optional.items() if value is not None})
    clash = sorted(set(OWN_ARGUMENTS) & set(config.engine_args))
    if clash:
        raise ConfigurationError(f"engine_args must not set {', '.join(clash)}: kvcomm sets them itself")
    kwargs.update(config.engine_args)
    try:
        return AsyncEngineArgs(**kwargs)
    except TypeError as error:
        raise ConfigurationError(f"engine_args holds a name that vLLM does not know: {error}") from error


def sampling_params(request: GenerationRequest, max_model_len: int) -> SamplingParams:
    """vLLM's sampling parameters for a request, with our wire parameters inside.

    Raises:
        ConfigurationError: vLLM refuses a value.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    options = request.sampling
    kwargs: dict[str, Any] = {
        name: value
        for name in (
            "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "logit_bias", "logprobs",
        )
        if (value := getattr(options, name)) is not None
    }  # fmt: skip
    room = max_model_len - len(request.prompt.token_ids)
    kwargs["max_tokens"] = room if options.max_tokens is None else min(options.max_tokens, room)
    if options.stop:
        kwargs["stop"] = list(options.stop)
    if options.stop_token_ids:
        kwargs["stop_token_ids"] = list(options.stop_token_ids)
    if options.structured_output is not None:
        kwargs["structured_outputs"] = StructuredOutputsParams(**options.structured_output)
    extra = dict(options.extra_args)
    extra["kv_transfer_params"] = request.params.to_transfer_params()
    try:
        return SamplingParams(
            **kwargs,
            ignore_eos=options.ignore_eos,
            min_tokens=options.min_tokens,
            skip_special_tokens=options.skip_special_tokens,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra,
        )
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"vLLM refuses the sampling options: {error}") from error
