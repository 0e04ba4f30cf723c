"""vLLM as it is, without our connector: what the engine with it is measured against."""

from __future__ import annotations

from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.engines.vllm_args import engine_args


class PlainEngine(InProcessEngine):
    """The in-process engine with the same arguments but no connector. Its answers carry no report."""

    async def _start(self) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_args(self.config)
        arguments.kv_transfer_config = None
        arguments.worker_extension_cls = ""
        self._llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[self._stats.factory])
