"""The class vLLM loads: passes each call on to the `ConnectorScheduler` or the `ConnectorWorker` of its process.

Use it with ``KVTransferConfig(kv_connector="KVCommConnector", kv_role="kv_both",
kv_connector_module_path="kvcomm_integrations.connector.connector", kv_connector_extra_config=<ReuseConfig>)``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.connector.compat import (
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
    Request,
    SchedulerOutput,
    VllmConfig,
    cached_blocks,
    unsupported_reason,
)
from kvcomm_integrations.connector.metadata import StepMetadata, WorkerReport
from kvcomm_integrations.connector.metrics import ReusePromMetrics, ReuseStats
from kvcomm_integrations.connector.scheduler import ConnectorScheduler
from kvcomm_integrations.connector.workarounds import (
    EngineCoreAccess,
    calling_runner,
    make_seeds_rewindable,
    step_being_taken_in,
)
from kvcomm_integrations.connector.worker.state_rpc import StateRpc
from kvcomm_integrations.connector.worker.worker import ConnectorWorker
from kvcomm_integrations.reuse.policies import create_policy


class KVCommConnector(KVConnectorBase_V1):
    """vLLM KV connector that reuses segments across different prefixes."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        assert vllm_config.kv_transfer_config is not None
        config = ReuseConfig.model_validate(vllm_config.kv_transfer_config.kv_connector_extra_config)
        create_policy(config.policy, **config.policy_options)
        for variant in config.variants:
            create_policy(variant)
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = ConnectorScheduler(vllm_config, kv_cache_config, config)
        else:
            self._worker = ConnectorWorker(vllm_config, config, unsupported_reason(vllm_config, kv_cache_config) or "")
        self._state_calls: StateRpc | None = None
        self._runner: Any = None

    @property
    def requires_kv_delivery(self) -> bool:
        """A harvest that does not happen costs a later dense prefill, nothing else."""
        return False

    @property
    def connector_scheduler(self) -> ConnectorScheduler:
        """The connector's side in vLLM's scheduler."""
        assert self._scheduler is not None, "this is the worker"
        return self._scheduler

    @property
    def connector_worker(self) -> ConnectorWorker:
        """The connector's side in a worker process."""
        assert self._worker is not None, "this is the scheduler"
        return self._worker

    @property
    def state_rpc(self) -> StateRpc:
        """Saving and loading of what this worker has learned."""
        if self._state_calls is None:
            self._state_calls = StateRpc(self._vllm_config, self.connector_worker)
        return self._state_calls

    # ---- statistics ------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler is not None:
            return self._scheduler.meter.take()
        return self.connector_worker.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return ReuseStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return ReusePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- scheduler --------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        shadows = self.connector_scheduler.shadows
        shadows.core = EngineCoreAccess.of_callers()
        if shadows.core is None:
            shadows.cannot_run()
        self.connector_scheduler.cached_blocks = partial(cached_blocks, kv_cache_manager)
        self.connector_scheduler.block_ids = lambda req_id: tuple(kv_cache_manager.get_block_ids(req_id)[0])

    def on_new_request(self, request: Request) -> None:
        self.connector_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.connector_scheduler.get_num_new_matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        self.connector_scheduler.update_state_after_alloc(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.connector_scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self.connector_scheduler.update_connector_output(report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        report = step_being_taken_in()
        if isinstance(report, WorkerReport):
            self.connector_scheduler.note_loads(report)
        return self.connector_scheduler.request_finished(request, block_ids)

    def reset_cache(self) -> bool | None:
        self.connector_scheduler.reset_cache()
        return True

    # ---- worker -----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._runner = calling_runner()
        self.connector_worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.connector_worker.step_begins(
            self._step()
        )  # one runner loads before its forward only if there is something to load

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        make_seeds_rewindable(self._runner)
        self.connector_worker.load(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are finished before the forward starts."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Harvests happen once, after the forward."""

    def wait_for_save(self) -> None:
        self.connector_worker.save(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self.connector_worker.take_released() or None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.connector_worker.load_errors.take()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.connector_worker.take_report()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.learner.background.close()

    def _step(self) -> StepMetadata:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMetadata)
        return meta
