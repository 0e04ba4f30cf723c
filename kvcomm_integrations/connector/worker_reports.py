"""Takes in what the workers answer: what they can do, hold and have learned, and what went wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvcomm_integrations.connector.circuit_breaker import CircuitBreaker
from kvcomm_integrations.connector.metadata import WorkerReport
from kvcomm_integrations.planning.planner import Planner
from kvcomm_integrations.planning.request_state import RequestState
from kvcomm_integrations.planning.reservations import Contribution

logger = logging.getLogger(__name__)


class WorkerReports:
    """Where the workers' reports go.

    Args:
        planner: the index, the edges and the workers' state that reports change.
        breaker: counts faults.
    """

    def __init__(self, planner: Planner, breaker: CircuitBreaker) -> None:
        self._planner = planner
        self._breaker = breaker

    def take_in(self, report: WorkerReport, live: Mapping[str, RequestState]) -> None:
        """Take in one step's report; ``live`` are the requests that still run."""
        self._abilities(report)
        if report.weights > self._planner.workers.weights:
            self._new_weights(report.weights, live)
        self._references(report)
        self._learned(report)
        for where, count in report.faults.items():
            for _ in range(count):
                self._breaker.fault(where, "see the worker's log")
        if report.forward is not None:
            self._planner.rates.note_forward(*report.forward)
        for req_id, result in report.loads.items():
            if result.fault:
                self._breaker.fault("load", result.fault)
            else:
                self._breaker.success("load")
            if req_id in live:
                live[req_id].result = result
                plan = live[req_id].plan
                if plan is not None and not result.fault and len(report.loads) == 1:
                    self._planner.rates.note_plan(plan, result.load_ms, result.repair_ms)

    def _abilities(self, report: WorkerReport) -> None:
        workers = self._planner.workers
        if report.disabled and not workers.disabled:
            workers.disabled = report.disabled
            self._planner.index.clear()
            logger.error("KV reuse is off: %s. Requests are served densely.", report.disabled)
        workers.verified = workers.verified or report.verified
        if report.repair_known and self._planner.config.repair and workers.repair_refusal != report.repair_refusal:
            workers.repair_refusal = report.repair_refusal
            if report.repair_refusal:
                logger.warning("No repair pass: %s. Plans stop at the first unknown token.", report.repair_refusal)

    def _new_weights(self, changes: int, live: Mapping[str, RequestState]) -> None:
        """Keys and values of other weights mean nothing: forget all, and keep nothing of what is half computed."""
        logger.warning("The model's weights have changed: references and learned corrections are forgotten")
        self._planner.workers.weights = changes
        self._planner.index.clear()
        self._planner.edges.clear()
        for state in live.values():
            state.outdated = state.outdated or state.admitted
            state.contribution = Contribution()

    def _references(self, report: WorkerReport) -> None:
        for ref_id, reason in report.failed.items():
            logger.warning("Reference %d was not stored: %s", ref_id, reason)
            self._planner.index.withdraw(ref_id)
            self._breaker.fault("harvest", reason)
        for ref_id, ranks in report.stored.items():
            self._planner.index.acknowledge(ref_id, ranks)
            self._breaker.success("harvest")

    def _learned(self, report: WorkerReport) -> None:
        for (policy, edge), examples in report.examples.items():
            self._planner.edges.learned(policy, edge, examples)
            if examples:
                self._breaker.success("learn")
        for (policy, edge, ref_id), leverage in report.leverage.items():
            entry = self._planner.index.by_id(ref_id)
            if entry is not None:
                entry.leverage[(policy, edge)] = leverage
        for audit in report.audits:
            self._breaker.success("audit")
            for edge in audit.edges:
                self._planner.edges.audited(audit.policy, edge, audit.kl[0])
