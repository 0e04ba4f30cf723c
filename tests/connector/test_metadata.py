"""Answers of several ranks become one."""

from __future__ import annotations

import pickle
from itertools import permutations

from kvcomm_integrations.connector.metadata import WorkerReport
from kvcomm_integrations.planning.jobs import AuditResult, LoadResult
from kvcomm_integrations.reuse.edge import Edge

EDGE = Edge("a", "b", "q")


def report(**changes: object) -> WorkerReport:
    return WorkerReport(**changes)  # type: ignore[arg-type]


def test_counts_add_up_and_faults_win_in_any_order() -> None:
    ranks = [
        {
            "stored": {1: 1, 2: 1},
            "loads": {"r": LoadResult(1.0, 5.0)},
            "examples": {("ridge", EDGE): 4},
            "leverage": {("ridge", EDGE, 1): 0.2},
            "repair_known": True,
        },
        {
            "stored": {1: 1},
            "failed": {2: "full"},
            "loads": {"r": LoadResult(3.0, 2.0, "KeyError: 7")},
            "examples": {("ridge", EDGE): 3},
            "leverage": {("ridge", EDGE, 1): 0.9},
            "repair_known": True,
            "repair_refusal": "pipeline",
            "verified": True,
        },
        {"stored": {1: 1}, "loads": {"r": LoadResult(2.0, 2.0), "s": LoadResult(1, 1)}, "repair_known": True},
    ]
    for order in permutations(ranks):
        joined = pickle.loads(
            pickle.dumps(report(**{k: v.copy() if isinstance(v, dict) else v for k, v in order[0].items()}))
        )
        for other in order[1:]:
            joined = joined.aggregate(report(**other))
        assert joined.stored == {1: 3, 2: 1}
        assert joined.failed == {2: "full"}
        assert joined.loads == {"r": LoadResult(3.0, 5.0, "KeyError: 7"), "s": LoadResult(1, 1)}
        assert joined.examples == {("ridge", EDGE): 3}
        assert joined.leverage == {("ridge", EDGE, 1): 0.9}
        assert (joined.repair_known, joined.repair_refusal, joined.verified) == (True, "pipeline", True)


def test_only_the_rank_with_logits_has_audits() -> None:
    audit = AuditResult("r", "ridge", (EDGE,), (0.1,), (True,), 10, 0, 5, 5)
    assert report().aggregate(report(audits=[audit])).audits == [audit]
    assert report(audits=[audit]).aggregate(report()).audits == [audit]


def test_one_rank_that_cannot_stops_all() -> None:
    assert report().aggregate(report(disabled="AMX")).disabled == "AMX"
    assert not report(repair_known=True).aggregate(report()).repair_known
