"""Taking in what the workers answer: what they can do, hold and have learned, and what went wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.connector.breaker import CircuitBreaker
from kvcomm_integrations.connector.edges import EdgeBook
from kvcomm_integrations.connector.index import ReferenceIndex
from kvcomm_integrations.connector.metadata import WorkerReport
from kvcomm_integrations.connector.tracking import Tracked, WorkersState

logger = logging.getLogger(__name__)


class Answers:
    """Where the workers' reports go.

    Args:
        config: our settings.
        index: references; an acknowledged one may be promised to requests.
        edges: what is known of each edge.
        workers: what the workers have reported of themselves.
        breaker: counts faults.
    """

    def __init__(
        self,
        config: ReuseConfig,
        index: ReferenceIndex,
        edges: EdgeBook,
        workers: WorkersState,
        breaker: CircuitBreaker,
    ) -> None:
        self.config = config
        self.index = index
        self.edges = edges
        self.workers = workers
        self.breaker = breaker

    def take(self, report: WorkerReport, live: Mapping[str, Tracked]) -> None:
        """Take in one step's report; ``live`` are the requests that still run."""
        self._abilities(report)
        if report.weights > self.workers.weights:
            self._new_weights(report.weights, live)
        self._references(report)
        self._learned(report)
        for seam, count in report.faults.items():
            for _ in range(count):
                self.breaker.fault(seam, "see the worker's log")
        for req_id, result in report.loads.items():
            if result.fault:
                self.breaker.fault("load", result.fault)
            else:
                self.breaker.success("load")
            if req_id in live:
                live[req_id].result = result

    def _abilities(self, report: WorkerReport) -> None:
        if report.disabled and not self.workers.disabled:
            self.workers.disabled = report.disabled
            self.index.clear()
            logger.error("KV reuse is off: %s. Requests are served densely.", report.disabled)
        self.workers.verified = self.workers.verified or report.verified
        if report.repair_known and self.config.repair and self.workers.repair_refusal != report.repair_refusal:
            self.workers.repair_refusal = report.repair_refusal
            if report.repair_refusal:
                logger.warning("No repair pass: %s. Plans stop at the first unknown token.", report.repair_refusal)

    def _new_weights(self, changes: int, live: Mapping[str, Tracked]) -> None:
        """Keys and values of other weights mean nothing: forget all, and keep nothing of what is half computed."""
        logger.warning("The model's weights have changed: references and learned corrections are forgotten")
        self.workers.weights = changes
        self.index.clear()
        self.edges.clear()
        for tracked in live.values():
            tracked.outdated = tracked.outdated or tracked.admitted
            tracked.harvests, tracked.observes, tracked.audits = [], [], []

    def _references(self, report: WorkerReport) -> None:
        for ref_id, reason in report.failed.items():
            logger.warning("Reference %d was not stored: %s", ref_id, reason)
            self.index.withdraw(ref_id)
            self.breaker.fault("harvest", reason)
        for ref_id, ranks in report.stored.items():
            self.index.acknowledge(ref_id, ranks)
            self.breaker.success("harvest")

    def _learned(self, report: WorkerReport) -> None:
        for (policy, edge), examples in report.examples.items():
            self.edges.learned(policy, edge, examples)
            if examples:
                self.breaker.success("learn")
        for (policy, edge, ref_id), leverage in report.leverage.items():
            entry = self.index.by_id(ref_id)
            if entry is not None:
                entry.leverage[(policy, edge)] = leverage
        for audit in report.audits:
            self.breaker.success("audit")
            for edge in audit.edges:
                self.edges.audited(audit.policy, edge, audit.kl[0])
