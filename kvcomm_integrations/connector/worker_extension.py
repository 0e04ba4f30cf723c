"""Methods vLLM mixes into its worker class (``worker_extension_cls``), so that ``collective_rpc`` can reach them."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from typing import Any

from kvcomm_integrations.connector.compat import current_connector
from kvcomm_integrations.connector.connector import KVCommConnector
from kvcomm_integrations.connector.worker.self_check import engine_error, repair_error
from kvcomm_integrations.connector.worker.state_rpc import StateAnswer
from kvcomm_integrations.connector.worker.worker import ConnectorWorker
from kvcomm_integrations.planning.jobs import AuditResult

EXTENSION = f"{__name__}.KVCommWorkerExtension"
"""What to give vLLM as ``worker_extension_cls``."""


def _worker() -> ConnectorWorker | None:
    """The connector's side in this process, if vLLM has loaded it."""
    connector = current_connector()
    return connector.connector_worker if isinstance(connector, KVCommConnector) else None


def _attention(runner: Any) -> str:
    """Name of the attention backend; empty where it is not known."""
    groups = getattr(runner, "attn_groups", None)
    return str(groups[0][0].backend.get_name()) if groups and groups[0] else ""


class KVCommWorkerExtension:
    """Calls from outside into a worker."""

    model_runner: Any
    rank: int

    def kvcomm_stats(self) -> dict[str, Any]:
        """Sizes of what this worker holds, for tests and reports."""
        worker = _worker()
        if worker is None:
            return {}
        return {
            "references": len(worker.store),
            "store_bytes": worker.store.nbytes,
            "policies": {name: policy.state_bytes() for name, policy in worker.learner.policies.items()},
            "edges": {name: len(policy.edges()) for name, policy in worker.learner.policies.items()},
            "loaded_tokens": worker.loaded_tokens,
            "repaired_tokens": worker.repaired_tokens,
            "layout": worker.cache.layout.value if worker.cache else "",
            "disabled": worker.disabled,
            "repair_refusal": worker.repair_refusal,
            "verified": worker.verified,
            "attention": _attention(self.model_runner),
        }

    def kvcomm_inject_fault(self, point: str, kind: str, times: int = 1, rank: int | None = None) -> None:
        """Make this worker (or only the one of a rank) fail at a point; for tests (see ``fault_injection``)."""
        worker = _worker()
        if worker is not None and rank in (None, self.rank):
            worker.faults.arm(point, kind, times)

    def kvcomm_check_repair(
        self, token_ids: list[int], gaps: list[list[int]], joined: bool = False
    ) -> dict[str, float]:
        """Run the repair pass on a sequence of its own and compare it with a dense run (see ``self_check``)."""
        worker = _worker()
        if worker is None or worker.cache is None:
            return {}
        spans = [(start, end) for start, end in gaps]
        return repair_error(self.model_runner, worker.cache, token_ids, spans, joined=joined)

    def kvcomm_check_engine(self, name: str, token_ids: list[int], gaps: list[list[int]]) -> float | None:
        """Run the repair pass on a prompt's first tokens and compare it with vLLM's own forward (see ``self_check``).

        ``name`` is the content that was harvested there from a dense request; ``None`` where none is held.
        """
        worker = _worker()
        if worker is None or worker.cache is None or worker.rope is None:
            return None
        for reference in map(worker.store.get, worker.store):
            if reference.name == name and reference.position == 0 and reference.tokens == len(token_ids):
                spans = [(start, end) for start, end in gaps]
                return engine_error(self.model_runner, worker.cache, worker.rope, reference, token_ids, spans)
        return None

    def kvcomm_take_audits(self) -> list[dict[str, Any]]:
        """The audits since the last call, as plain objects; empty on ranks that hold no logits."""
        worker = _worker()
        log = worker.audit_log if worker is not None else deque[AuditResult]()
        taken = [asdict(log.popleft()) for _ in range(len(log))]
        for audit in taken:
            audit["edges"] = [list(edge) for edge in audit["edges"]]
        return taken

    def kvcomm_save_state(self, path: str, tenant: str | None = None) -> StateAnswer:
        """Write this rank's share of the learned corrections; see ``StateRpc.save``."""
        return self._state("save", path, tenant)

    def kvcomm_load_state(self, path: str, tenant: str | None = None) -> StateAnswer:
        """Read and check this rank's share of a state file; nothing is changed yet. See ``StateRpc.load``."""
        return self._state("load", path, tenant)

    def kvcomm_apply_state(self, merge: bool = False) -> StateAnswer:
        """Put what ``kvcomm_load_state`` has read into effect; see ``StateRpc.apply``."""
        return self._state("apply", merge)

    def kvcomm_clear_state(self, tenant: str | None = None) -> StateAnswer:
        """Forget learned corrections; see ``StateRpc.clear``."""
        return self._state("clear", tenant)

    def _state(self, method: str, *args: Any) -> StateAnswer:
        connector = current_connector()
        if not isinstance(connector, KVCommConnector):
            return StateAnswer(error="this worker has no kvcomm connector")
        return connector.state_rpc.call(method, *args)

    def kvcomm_save_references(self, folder: str) -> int:
        """Write every reference to ``folder`` as ``<rank>-<ref_id>.safetensors``; returns how many there are."""
        worker = _worker()
        if worker is None:
            return 0
        from safetensors.torch import save_file

        store = worker.store
        for reference in map(store.get, store):
            save_file(
                {"keys": reference.keys.contiguous(), "values": reference.values.contiguous()},
                f"{folder}/{self.rank}-{reference.ref_id}.safetensors",
                metadata={"source": reference.source, "position": str(reference.position), "name": reference.name},
            )
        return len(store)
