"""What the package relies on in vLLM beyond its public interface, and whether a version of vLLM has it.

``make compat VLLM=0.33.0`` reads the sources of a version, which need not be installed. An engine that starts on a
version that nobody has checked reads those that are installed. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kvcomm_integrations.errors import MissingDependencyError

SUPPORTED_VLLM = ((0, 32), (0, 34))
"""First supported version of vLLM, and the first that is not."""
CHECKED_VLLM = ("0.32.0", "0.33.0")
"""Versions that have all of it, by ``make compat``."""
REMEDY = "install 'vllm>={0[0]}.{0[1]},<{1[0]}.{1[1]}'".format(*SUPPORTED_VLLM)
ENTRY = re.compile(r"^ *(ours )?([\w.]+)(?:: (.*)|(\()(.*)\))? *$")


class Need(NamedTuple):
    """A class or function of vLLM that is relied upon, with attributes of the class or variables of the function.

    ``arguments`` are those that we give it or, where vLLM calls ``ours`` in its place, the parameters of ours.
    """

    module: str
    use: str
    name: str
    has: list[str]
    arguments: list[str] | None
    ours: bool


def needs(table: str) -> tuple[Need, ...]:
    """Read a table of lines ``module | what for | entries``, each with further entries on indented lines below it.

    Entries, with ``;`` in between, are ``Class: attribute attribute`` or ``function: variable``, ``function(argument,
    argument)`` as we call it, and ``ours Class.method(parameter)`` as we replace it. ``.method`` is of the last class.
    """
    found, module, use, owner = [], "", "", ""
    for line in table.splitlines():
        if not line.startswith(" "):
            module, use, line = line.split(" | ")
        for entry in line.split(";"):
            [(ours, name, has, call, given)] = ENTRY.findall(entry)
            owner = owner if name.startswith(".") else name.partition(".")[0]
            name = owner + name if name.startswith(".") else name
            arguments = [part for part in given.split(", ") if part] if call else None
            found.append(Need(module, use, name, has.split(), arguments, bool(ours)))
    return tuple(found)


REUSE = needs("""\
vllm.distributed.kv_transfer.kv_connector.v1.base | the connector | KVConnectorMetadata; KVConnectorWorkerMetadata()
    ours .aggregate(other); KVConnectorRole: SCHEDULER WORKER; KVConnectorBase_V1(vllm_config, role, kv_cache_config)
    KVConnectorBase_V1: requires_kv_delivery _get_connector_metadata _vllm_config; ours .on_new_request(request)
    ours .get_num_new_matched_tokens(request, num_computed_tokens); ours .bind_kv_cache_manager(kv_cache_manager)
    ours .update_state_after_alloc(request, blocks, num_external_tokens); ours .build_connector_meta(scheduler_output)
    ours .update_connector_output(connector_output); ours .request_finished(request, block_ids); ours .reset_cache()
    ours .register_kv_caches(kv_caches); ours .start_load_kv(forward_context); ours .wait_for_layer_load(layer_name)
    ours .save_kv_layer(layer_name, kv_layer, attn_metadata); ours .build_kv_connector_stats(data); ours .shutdown()
    ours .get_finished(finished_req_ids); ours .get_block_ids_with_load_errors(); ours .build_connector_worker_meta()
    ours .get_kv_connector_stats(); ours .wait_for_save(); ours .bind_connector_metadata(connector_metadata)
    ours .build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
vllm.v1.outputs | carries the workers' answers | KVConnectorOutput: kv_connector_worker_meta
vllm.distributed.kv_transfer | finds a worker's connector | get_kv_transfer_group(); has_kv_transfer_group()
vllm.distributed.kv_transfer.kv_connector.v1.metrics | metrics | KVConnectorStats(data); ours .aggregate(other)
    KVConnectorStats: data reset reduce is_empty; ours KVConnectorPromMetrics.observe(transfer_stats_data, engine_idx)
    KVConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
    KVConnectorPromMetrics: _counter_cls _gauge_cls _histogram_cls _labelnames per_engine_labelvalues
vllm.config | settings, and which models can be reused | CompilationConfig: static_forward_context
    VllmConfig: model_config cache_config parallel_config scheduler_config compilation_config speculative_config
    VllmConfig: kv_transfer_config; KVTransferConfig: kv_connector_extra_config; SchedulerConfig: max_num_batched_tokens
    ModelConfig: model revision dtype hf_text_config enforce_eager get_total_num_kv_heads; CacheConfig: cache_dtype
    ParallelConfig: rank world_size tensor_parallel_size pipeline_parallel_size data_parallel_size use_ubatching
    ParallelConfig: decode_context_parallel_size prefill_context_parallel_size; CacheConfig: hash_block_size
vllm.distributed.parallel_state | a rank's heads and layers | get_pp_group(); get_tensor_model_parallel_rank()
    get_tp_group(); model_parallel_is_initialized(); GroupCoordinator: world_size cpu_group is_first_rank
vllm.v1.request | requests, and the block hashes that hide approximate blocks | Request.update_block_hashes()
    Request(request_id, prompt_token_ids, sampling_params, pooling_params, cache_salt, block_hasher)
    Request: request_id status kv_transfer_params num_prompt_tokens prompt_token_ids prompt_embeds mm_features
    Request: cache_salt lora_request resumable skip_reading_prefix_cache num_computed_tokens num_preemptions
    Request: num_output_tokens output_token_ids block_hashes _block_hasher
    RequestStatus: RUNNING FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_ABORTED; Request: arrival_time
vllm.v1.core.sched.output | what a step computes | SchedulerOutput: num_scheduled_tokens
vllm.v1.core.sched.scheduler | the report of a request of one token | Scheduler.update_from_output: kv_connector_output
vllm.v1.core.sched.scheduler | shadow requests | Scheduler.finish_requests(request_ids, finished_status)
    Scheduler: max_num_scheduled_tokens pause_state parallel_config scheduler_config
vllm.v1.engine.core | shadow requests | EngineCoreProc: input_queue request_block_hasher batch_queue_size is_running
vllm.v1.engine | shadow requests | EngineCoreRequestType: ADD
vllm.v1.core.kv_cache_manager | blocks | KVCacheManager.get_block_ids(request_id); KVCacheBlocks.get_block_ids()
    KVCacheManager: block_pool
vllm.v1.core.block_pool | an agent's own past | BlockPool.get_cached_block(block_hash, kv_cache_group_ids)
vllm.v1.kv_cache_interface | which models can be reused, and the size of their KV | MLAAttentionSpec
    FullAttentionSpec: sliding_window attention_chunk_size block_size page_size_bytes
    KVCacheConfig: kv_cache_groups; KVCacheGroupSpec: kv_cache_spec layer_names
vllm.forward_context | the repair pass's forward, and the step's own, which it may join | get_forward_context()
    is_forward_context_available(); ForwardContext: attn_metadata slot_mapping is_padding ubatch_slices dp_metadata
    set_forward_context(attn_metadata, vllm_config, num_tokens, slot_mapping, is_padding)
vllm.v1.attention.backend | attention of the repair pass | AttentionMetadataBuilder: kv_cache_spec
    AttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)
    .build(common_prefix_len, common_attn_metadata); CommonAttentionMetadata(query_start_loc, query_start_loc_cpu, \
seq_lens, num_reqs, num_actual_tokens, max_query_len, max_seq_len, block_table_tensor, slot_mapping, causal, \
positions, seq_lens_cpu_upper_bound, is_prefilling)
vllm.v1.attention.backends.cpu_attn | writes KV; the step's own forward, which the repair pass may join | \
CPUAttentionMetadata: num_actual_tokens causal query_start_loc seq_lens block_table slot_mapping
    CPUAttentionBackendImpl.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
vllm.v1.attention.backends.flash_attn | writes KV | \
FlashAttentionImpl.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
vllm.v1.attention.backends.flashinfer | writes KV; its scratch memory | \
FlashInferMetadataBuilder: set_workspace_buffer _get_workspace_buffer
    FlashInferImpl.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
vllm.v1.worker.utils | attention of the repair pass | AttentionGroup.get_metadata_builder(ubatch_id)
    AttentionGroup: layer_names kernel_block_size metadata_builders
vllm.v1.worker.gpu_worker | calls into a worker | Worker: model_runner rank
vllm.v1.worker.gpu_model_runner | the repair pass on the first model runner | GPUModelRunner: uses_mrope input_batch
    GPUModelRunner: model vllm_config device attn_groups kv_cache_config reload_weights reset_lora_state requests
vllm.v1.worker.gpu_input_batch | seeds | InputBatch: generators req_ids; CachedRequestState: generator
vllm.v1.worker.gpu.model_runner | the repair pass on the second model runner | GPUModelRunner: model vllm_config device
    GPUModelRunner: attn_groups kv_cache_config model_state reload_weights reset_lora_state
vllm.v1.worker.gpu.model_states.default | the repair pass on the second model runner | DefaultModelState: rope_state
vllm.v1.worker.gpu.attn_utils | attention of the repair pass on the second model runner | \
build_attn_metadata(attn_groups, num_reqs, num_tokens, query_start_loc_gpu, query_start_loc_cpu, max_query_len, \
seq_lens, max_seq_len, block_tables, slot_mappings, kv_cache_config, seq_lens_cpu_upper_bound, positions, \
is_prefilling, ubatch_idx)
vllm.v1.worker.gpu.kv_connector | the second model runner calls the connector | ActiveKVConnector: pre_forward
""")
"""What reuse needs."""
FRONT_END = needs("""\
vllm.v1.engine.async_llm | the engine in process | AsyncLLM.from_engine_args(engine_args, stat_loggers)
    AsyncLLM: generate shutdown collective_rpc reset_prefix_cache vllm_config
vllm.v1.engine.exceptions | tells an engine's end from a request's | EngineDeadError; EngineGenerateError
vllm.v1.metrics.loggers | the load of an engine | ours StatLoggerBase(vllm_config, engine_index)
    ours .log_engine_initialized(); ours .record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
vllm.v1.metrics.stats | the load of an engine | SchedulerStats: kv_cache_usage num_running_reqs num_waiting_reqs
vllm.parser | vLLM's parsers | ParserManager.get_parser(tool_parser_name, reasoning_parser_name, enable_auto_tools)
vllm.entrypoints.openai.chat_completion.protocol | vLLM's parsers | ChatCompletionRequest
""")
"""What the engine in process and the readers of answers need."""


class Sources:
    """The modules of a vLLM, from a wheel or the folder that holds the package: read, not imported."""

    def __init__(self, path: Path) -> None:
        self._root: Any = path if path.is_dir() else zipfile.Path(path)
        self._modules: dict[str, tuple[str, list[ast.stmt]]] = {}

    def missing(self, wanted: Iterable[Need] = REUSE + FRONT_END) -> list[tuple[str, str, str]]:
        """What is not there: in which file, what, and what for."""
        return [(self._module(need.module)[0], what, need.use) for need in wanted for what in self._lacks(need)]

    def _module(self, name: str) -> tuple[str, list[ast.stmt]]:
        """A module's file, or where it should be, and what stands at its top level."""
        if name not in self._modules:
            files = [name.replace(".", "/") + end for end in (".py", "/__init__.py")]
            file = next((file for file in files if (self._root / file).is_file()), None)
            text = (self._root / file).read_text(encoding="utf-8") if file is not None else ""
            self._modules[name] = file or files[0], _statements(ast.parse(text).body)
        return self._modules[name]

    def _lacks(self, need: Need) -> Iterator[str]:
        first, *rest = need.name.split(".")
        module, found = self._find(need.module, first)
        for name in rest:
            found = self._members(module, found).get(name)
        if found is None:
            yield need.name
            return
        names = self._members(module, found)
        made = names.get("__init__", found)
        if isinstance(made, ast.FunctionDef | ast.AsyncFunctionDef):
            taken = _parameters(made.args)
        else:
            taken = {name: part.value is None for name, part in names.items() if isinstance(part, ast.AnnAssign)}
        yield from (f"{need.name}.{name}" for name in need.has if name not in names)
        if need.ours and need.arguments != list(taken):
            yield f"{need.name}({', '.join(need.arguments or ())}), it is ({', '.join(taken)})"
        elif need.arguments is not None and not need.ours:
            yield from (f"{need.name}({name}=)" for name in need.arguments if name not in taken)
            new = (name for name, required in taken.items() if required and name not in need.arguments)
            yield from (f"{need.name} without {name}=" for name in new)

    def _find(self, module: str, name: str) -> tuple[str, ast.AST | None]:
        """The definition of a name, wherever it was imported from, and the module it stands in."""
        for node in self._module(module)[1]:
            if getattr(node, "name", "") == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._find(str(node.module), alias.name)
        return module, None

    def _members(self, module: str, node: ast.AST | None) -> dict[str, ast.AST]:
        """Attributes of a class and of its instances, inherited ones too; variables of a function."""
        members: dict[str, ast.AST] = {}
        for base in reversed(getattr(node, "bases", ())):
            name = base.value if isinstance(base, ast.Subscript) else base
            members |= self._members(*self._find(module, name.id)) if isinstance(name, ast.Name) else {}
        for part in ast.walk(node or ast.Pass()):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part)[:5] == "self.":
                members.setdefault(part.attr, part)
        for statement in _statements(getattr(node, "body", [])):
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            members |= {target.id: statement for target in targets if isinstance(target, ast.Name)}
            members |= {statement.name: statement} if hasattr(statement, "name") else {}
        return members


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Those of a body, and of its branches."""
    inner = (ast.iter_child_nodes(node) for node in body if isinstance(node, ast.If | ast.Try))
    return body + [part for parts in inner for part in parts if isinstance(part, ast.stmt)]


def _parameters(arguments: ast.arguments) -> dict[str, bool]:
    """Names of parameters, each with whether it must be given."""
    named = [*arguments.posonlyargs, *arguments.args]
    needed = len(named) - len(arguments.defaults)
    found = {part.arg: place < needed for place, part in enumerate(named) if part.arg not in ("self", "cls")}
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return found | {part.arg: value is None for part, value in keywords}


def installed() -> Sources:
    """The vLLM that is installed; raises ``MissingDependencyError`` if none is."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise MissingDependencyError("vLLM is not installed; install kvcomm-integrations[vllm], or [cpu] on a CPU")
    return Sources(Path(spec.origin).parents[1])


@cache
def shortcoming(version: str) -> str:
    """What reuse needs and the installed vLLM of this version lacks, with the remedy; empty if nothing.

    A version that has been checked is not read again; another takes a second or two.
    """
    unchecked = version.partition("+")[0] not in CHECKED_VLLM
    missing = [what for _, what, _ in installed().missing(REUSE)] if unchecked else []
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"vLLM {version} lacks {', '.join(missing[:3])}{more}, which reuse needs; {REMEDY}" if missing else ""


def unusable(error: ImportError) -> MissingDependencyError:
    """What to raise in place of an error that importing from vLLM has raised."""
    version = getattr(sys.modules.get("vllm"), "__version__", "")
    return MissingDependencyError(shortcoming(version) or f"vLLM {version} cannot be imported ({error}); {REMEDY}")


def main(path: str = "") -> int:
    """Check a wheel or folder, or the installed vLLM; returns 1 if something is missing."""
    missing = (Sources(Path(path)) if path else installed()).missing()
    for file, what, use in missing:
        print(f"{file}: no {what} ({use})")
    print(f"{Path(path).name or 'vLLM'}: {len(REUSE + FRONT_END)} things are relied upon, {len(missing)} are missing")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
