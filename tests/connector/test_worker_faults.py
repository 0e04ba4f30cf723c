"""What a worker does when something fails: nothing that is not a number is written, and nobody is left waiting."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcomm_integrations.connector.metadata import StepMetadata, WorkerReport
from kvcomm_integrations.connector.worker import worker as worker_module
from kvcomm_integrations.connector.worker.fault_injection import SWITCH, FaultInjector
from kvcomm_integrations.connector.worker.worker import FAILED_ALONE, MEMORY, ConnectorWorker
from kvcomm_integrations.errors import ConfigurationError, EngineError
from kvcomm_integrations.planning.jobs import AuditJob, AuditVariant, HarvestJob, LoadJob, LoadSpan, ObserveJob
from tests.connector.test_worker import EDGE, _fill, _harvest, _worker

SPAN = LoadSpan(7, offset=0, start=20, end=40, edge=EDGE)
JOB = LoadJob("r", (5, 6, 7), "ridge", (SPAN,), (), tuple(range(24)), 16, 40)
BLOCKS_LOST = {6, 7}


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")


@pytest.fixture
def half() -> ConnectorWorker:
    half = _worker()
    _fill(half, (0, 1, 2), 40, seed=3)
    _harvest(half, 7, (0, 1, 2), 0, 40)
    half.take_report()
    return half


@pytest.fixture
def rescued(half: ConnectorWorker, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The gaps that the repair pass was given."""
    gaps: list[Any] = []

    class Forward:
        def __init__(self, runner: Any, cache: Any, found: Any) -> None:
            self.found = found

        def join(self, done: Any) -> bool:
            return False

        def __call__(self) -> None:
            gaps.extend(self.found)

    monkeypatch.setattr(worker_module, "prepare_repair", Forward)
    half.repair_refusal = None
    return gaps


def report_of(half: ConnectorWorker) -> WorkerReport:
    report = half.take_report()
    assert report is not None
    return report


def learn(half: ConnectorWorker) -> None:
    _fill(half, (3, 4), 32, seed=4)
    half.save(StepMetadata(observes=[ObserveJob("ridge", EDGE, 7, 0, (3, 4), 0, 30)]))


@pytest.mark.parametrize(
    ("seam", "kind"), [("reference", "raise"), ("correct", "raise"), ("correct", "nan"), ("reference", "nan")]
)
def test_a_failed_load_is_computed_whole(half: ConnectorWorker, rescued: list[Any], seam: str, kind: str) -> None:
    half.faults.arm(seam, kind)
    half.load(StepMetadata(loads=[JOB]))
    [gap] = rescued
    assert (gap.start, gap.end, gap.token_ids) == (16, 40, JOB.token_ids)
    assert half.cache is not None
    assert torch.count_nonzero(half.cache.read((5, 6, 7), 16, 40).keys) == 0  # nothing was written before the check
    assert report_of(half).loads["r"].fault
    assert (half.loaded_tokens, half.repaired_tokens) == (0, 24)
    assert half.load_errors.take() == set()
    half.load(StepMetadata(loads=[JOB]))
    assert report_of(half).loads["r"].fault == ""


def test_a_forward_that_went_round_what_had_joined_it_ends_the_engine(
    half: ConnectorWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens would be counted as repaired, and the answer made from nothing."""
    asked: list[Any] = []
    joining = SimpleNamespace(join=lambda done: asked.append(done) or True)
    monkeypatch.setattr(worker_module, "prepare_repair", lambda *args: joining)
    half.repair_refusal = None
    gappy = LoadJob("gappy", (5, 6, 7), "aligned", (SPAN,), ((16, 20),), tuple(range(24)), 16, 40)
    half.load(StepMetadata(loads=[gappy]))

    def fail_and_save() -> None:
        try:
            raise RuntimeError("the model failed")
        finally:
            half.save(StepMetadata())

    with pytest.raises(EngineError, match="went round"):
        half.save(StepMetadata())
    with pytest.raises(RuntimeError, match="the model failed"):
        fail_and_save()
    asked[0](5.0)
    half.save(StepMetadata())
    assert report_of(half).loads["gappy"].repair_ms >= 5


def test_without_a_repair_pass_vllm_hears_of_the_blocks(half: ConnectorWorker) -> None:
    half.faults.arm("correct", "raise")
    half.load(StepMetadata(loads=[JOB]))
    assert half.load_errors.take() == BLOCKS_LOST
    assert half.load_errors.take() == set()
    assert "injected" in report_of(half).loads["r"].fault


@pytest.mark.parametrize("seam", ["repair", "forward"])
def test_a_failed_repair_pass_loses_only_those_that_needed_it(
    half: ConnectorWorker, rescued: list[Any], seam: str
) -> None:
    whole = LoadJob("whole", (8, 9), "aligned", (LoadSpan(7, 0, 16, 32, EDGE),), (), (0,) * 16, 16, 32)
    gappy = LoadJob("gappy", (5, 6, 7), "aligned", (SPAN,), ((16, 20),), tuple(range(24)), 16, 40)
    half.faults.arm(seam, "raise")
    half.load(StepMetadata(loads=[whole, gappy]))
    loads = report_of(half).loads
    assert loads["whole"].fault == "" and "repair" in loads["gappy"].fault
    assert half.load_errors.take() == BLOCKS_LOST
    assert rescued == []


GAPPY = LoadJob("r", (5, 6, 7), "aligned", (SPAN,), ((16, 20),), (0,) * 24, 16, 40)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the process can be caught."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)


def test_where_ranks_wait_for_one_another_a_fault_ends_the_process(
    half: ConnectorWorker, rescued: list[Any], ended: None
) -> None:
    half._vllm_config.parallel_config.world_size = 2
    half.faults.arm("forward", "raise")
    with pytest.raises(SystemExit, match=str(FAILED_ALONE)):
        half.load(StepMetadata(loads=[GAPPY]))


def test_before_that_ranks_agree_not_to_start(
    half: ConnectorWorker, rescued: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    half._vllm_config.parallel_config.world_size = 2
    half.faults.arm("repair", "raise")
    half.load(StepMetadata(loads=[GAPPY]))
    assert "injected" in report_of(half).loads["r"].fault
    answers = [[""], ["another rank failed"]]  # the loads went well, the preparation did not
    monkeypatch.setattr(worker_module, "agree_on_faults", lambda faults: answers.pop(0))
    half.load_errors.take()
    half.load(StepMetadata(loads=[GAPPY]))
    assert half.load_errors.take() == BLOCKS_LOST
    assert "another rank failed" in report_of(half).loads["r"].fault
    assert rescued == [] and half.repaired_tokens == 0


@pytest.mark.parametrize("other", [False, True])
def test_ranks_agree_before_an_audit(half: ConnectorWorker, monkeypatch: pytest.MonkeyPatch, other: bool) -> None:
    """A rank that does not come along would leave the others waiting inside the model."""
    started: list[AuditJob] = []
    monkeypatch.setattr(worker_module, "audit", lambda runner, cache, job, *rest: started.append(job) or iter(()))
    job = AuditJob("r", (5, 6, 7), (0,) * 42, 40, 0, (AuditVariant("aligned", (SPAN,), ((0, 20),), 40),))
    half.save(StepMetadata(audits=[job]))
    assert started == [job]
    if other:
        monkeypatch.setattr(worker_module, "agree_on_faults", lambda faults: ["another rank failed"])
    else:
        half.faults.arm("audit", "raise")
    half.save(StepMetadata(audits=[job]))
    assert started == [job]
    assert half._report.faults == ({} if other else {"audit": 1})


def test_an_audit_that_fails_inside_the_model(half: ConnectorWorker, ended: None) -> None:
    job = AuditJob("r", (5, 6, 7), (0,) * 42, 40, 0, (AuditVariant("aligned", (SPAN,), ((0, 20),), 40),))
    half.save(StepMetadata(audits=[job]))  # there is no runner here
    assert report_of(half).faults == {"audit": 1}
    half._vllm_config.parallel_config.world_size = 2
    with pytest.raises(SystemExit, match=str(FAILED_ALONE)):
        half.save(StepMetadata(audits=[job]))


def test_a_fault_of_another_rank_is_ours_too(
    half: ConnectorWorker, rescued: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [["another rank failed"], [""]]  # while loading; in preparing the repair pass, none did
    monkeypatch.setattr(worker_module, "agree_on_faults", lambda faults: answers.pop(0))
    half.load(StepMetadata(loads=[JOB]))
    assert [(gap.start, gap.end) for gap in rescued] == [(16, 40)]
    assert report_of(half).loads["r"].fault == "another rank failed"


def test_bad_blocks_are_neither_harvested_nor_learned_from(half: ConnectorWorker) -> None:
    half.faults.arm("correct", "raise")
    half.load(StepMetadata(loads=[JOB]))
    harvest = HarvestJob(9, (5, 6, 7), 20, 40, "text", "a", "", dense=True)
    lesson = ObserveJob("ridge", EDGE, 7, 0, (5, 6, 7), 20, 20)
    half.save(StepMetadata(harvests=[harvest], observes=[lesson]))
    report = report_of(half)
    assert report.failed == {9: "its prompt was never computed"}
    assert report.examples == {}
    for _ in range(MEMORY + 1):
        half.load_errors.take()
    half.save(StepMetadata(harvests=[harvest]))
    assert report_of(half).stored == {9: 1}


def test_a_spoiled_reference_is_given_up(half: ConnectorWorker, rescued: list[Any]) -> None:
    half.store.get(7).keys[0, 0, 3, 3] = torch.inf
    half.load(StepMetadata(loads=[JOB]))
    report = report_of(half)
    assert list(report.failed) == [7] and report.examples == {}
    assert len(rescued) == 1


def test_a_spoiled_correction_is_forgotten(half: ConnectorWorker, rescued: list[Any]) -> None:
    learn(half)
    assert report_of(half).examples == {("ridge", EDGE): 1}
    half.faults.arm("correct", "nan")
    half.load(StepMetadata(loads=[JOB]))
    report = report_of(half)
    assert report.examples == {("ridge", EDGE): 0} and report.failed == {}
    assert half.learner.policies["ridge"].edges() == ()


@pytest.mark.parametrize("kind", ["raise", "nan"])
def test_nothing_is_learned_from_what_is_not_a_number(half: ConnectorWorker, kind: str) -> None:
    half.faults.arm("observe", kind)
    learn(half)
    report = report_of(half)
    assert report.faults == {"learn": 1} and report.examples == {}
    assert half.learner.policy("ridge").edges() == ()


@pytest.mark.parametrize("kind", ["raise", "nan"])
def test_a_failed_harvest_is_said_to_have_failed(half: ConnectorWorker, kind: str) -> None:
    half.faults.arm("harvest", kind)
    _harvest(half, 8, (0, 1, 2), 0, 40)
    report = report_of(half)
    assert list(report.failed) == [8] and report.stored == {}
    assert len(half.store) == 1


def test_a_full_store_is_a_failed_harvest(half: ConnectorWorker) -> None:
    half.store.max_bytes = half.store.nbytes
    _harvest(half, 8, (0, 1, 2), 0, 40)
    assert "does not fit" in report_of(half).failed[8]


def test_an_answer_can_be_lost(half: ConnectorWorker) -> None:
    half.faults.arm("report", "lose")
    _harvest(half, 8, (0, 1, 2), 0, 40)
    assert half.take_report() is None
    assert half.take_report() is None


def test_a_slow_seam_is_only_slow(half: ConnectorWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    half.faults.arm("correct", "slow")
    half.load(StepMetadata(loads=[JOB]))
    assert len(naps) == 1
    assert report_of(half).loads["r"].fault == ""


def test_all_policies_together_keep_to_the_budget() -> None:
    """A client that asks for every policy in turn must not get a budget for each."""
    half = _worker()
    _fill(half, (0, 1, 2), 40, seed=3)
    _harvest(half, 7, (0, 1, 2), 0, 40)
    _fill(half, (3, 4), 32, seed=4)
    policies = ("ridge", "kvcomm", "kvcmas")
    lessons = [
        ObserveJob(policy, EDGE._replace(target=str(number)), 7, 0, (3, 4), 0, 30)
        for number in range(6)
        for policy in policies
    ]
    half.save(StepMetadata(observes=lessons[:3]))
    budget = 3 * sum(half.learner.policies[policy].state_bytes() for policy in policies)
    half.learner.config = half.config.model_copy(update={"state_bytes": budget})
    half.save(StepMetadata(observes=lessons[3:]))
    assert sum(half.learner.policies[policy].state_bytes() for policy in policies) <= budget
    examples = report_of(half).examples
    for policy in policies:
        known = set(half.learner.policies[policy].edges())
        assert {edge for (name, edge), count in examples.items() if name == policy and count} == known
        assert known


def test_nothing_is_kept_of_a_reference_dropped_while_the_background_works(half: ConnectorWorker) -> None:
    learn(half)
    assert half.learner.background.wait(10)
    snapshot = half.store.snapshot()
    half.save(StepMetadata(drops=[7]))
    half.store.snapshot = lambda: snapshot  # type: ignore[method-assign]
    half.learner.prepare("ridge", half.learner.policies["ridge"], EDGE)
    assert half.learner.leverages._known == {}


def test_reports_say_again_and_again_whether_there_is_a_repair_pass(half: ConnectorWorker) -> None:
    """A rank that attaches one step after another must not keep the repair pass off for good."""
    half.attach(object())
    assert half.take_report() is not None
    _harvest(half, 8, (0, 1, 2), 0, 40)
    report = report_of(half)
    assert report.repair_known and report.repair_refusal


def test_ranks_join_their_faults() -> None:
    joined = WorkerReport(faults={"learn": 1}).aggregate(WorkerReport(faults={"learn": 2, "audit": 1}))
    assert isinstance(joined, WorkerReport)
    assert joined.faults == {"learn": 2, "audit": 1}


def test_faults_cannot_be_armed_in_production(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH)
    with pytest.raises(ConfigurationError, match=SWITCH):
        FaultInjector().arm("correct", "raise")


@pytest.mark.parametrize(("seam", "kind"), [("nowhere", "raise"), ("correct", "sing")])
def test_unknown_faults_are_refused(seam: str, kind: str) -> None:
    with pytest.raises(ConfigurationError, match="injection points are"):
        FaultInjector().arm(seam, kind)


@pytest.mark.parametrize("ends", ["well", "dropped", "outdated"])
def test_an_audit_in_pieces_is_reported_as_over_until_somebody_hears_it(
    half: ConnectorWorker, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """A report may be lost, and a request's blocks are held until its audit is over; ranks fail alike on a drop."""
    pieces: list[int] = []

    def pretend(runner: Any, cache: Any, job: AuditJob, *rest: Any) -> Iterator[list[Any]]:
        for piece in range(2):
            pieces.append(piece)
            yield []
        if ends == "dropped":
            raise KeyError("reference 1")

    monkeypatch.setattr(worker_module, "audit", pretend)
    monkeypatch.setattr(worker_module, "agree_on_faults", lambda faults: faults)
    half._vllm_config.parallel_config.world_size = 2
    half.weights = ends == "outdated"
    job = AuditJob("r", (5, 6, 7), (0,) * 42, 40, 0, (AuditVariant("aligned", (SPAN,), ((0, 20),), 40),))
    told = []
    for step in range(5):
        half.save(StepMetadata(sliced_audit=None if step else job, audit_tokens=8))
        told.append(half._report.audit_over)
        half._report.audit_over = ""
    assert pieces == ([] if ends == "outdated" else [0, 1])
    assert told == (["r"] * 5 if ends == "outdated" else ["", "", "r", "r", "r"])
    assert half._report.faults == {}
