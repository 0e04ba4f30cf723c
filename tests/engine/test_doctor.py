"""The doctor's runs on the real engine, which it starts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcomm_integrations.doctor.finding import Measured, State
from kvcomm_integrations.doctor.measurements import SelfTest
from kvcomm_integrations.doctor.smoke import smoke
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.wire import Mode
from tests.engine.helpers import QUESTIONS, Client

pytestmark = pytest.mark.engine
LINES = {"Engine", "Runs with", "Cache layout", "Rotary positions", "Repair pass", "Reuse"}


def test_smoke_run_is_good(demo_model: Path) -> None:
    findings = {finding.name: finding for finding in smoke(str(demo_model))}
    assert {finding.state for finding in findings.values()} == {State.GOOD}, findings
    assert set(findings) == LINES


def test_results_are_right_and_times_are_measured(demo_model: Path) -> None:
    test = SelfTest({"dtype": "float32", "max_model_len": 1024}, content=256, rounds=1)
    findings = {finding.name: finding for finding in smoke(str(demo_model), test)}
    assert "-generation model runner" in findings["Runs with"].found and "float32" in findings["Runs with"].found
    measured = {name: finding for name, finding in findings.items() if isinstance(finding, Measured)}
    assert len(measured) == 7 and set(findings) - set(measured) == LINES
    for name in ("dense answers", "repair pass", "load into its own context", "tokens reused"):
        assert measured[name].state is State.GOOD, measured[name]
    assert State.BAD not in {finding.state for finding in measured.values()}
    assert test.figures["content"] == 256 and len(test.figures["ttft_ms"]["reuse"]) == 1


def test_wrong_tokens_are_seen_against_vllms_own_forward(inprocess_engine: InProcessEngine, session: str) -> None:
    """Unlike a comparison of the repair pass with itself."""
    client = Client(inprocess_engine)
    ids = client.encode(" ".join(QUESTIONS))
    client.ask(client.prompt(("doctor", ids), "?"), session=session, mode=Mode.OBSERVE, respond=False, tokens=2)
    inprocess_engine.drain()
    gaps = [[0, 5], [20, 21], [40, 90]]
    [right] = inprocess_engine.call_workers("kvcomm_check_engine", "doctor", list(ids), gaps)
    [wrong] = inprocess_engine.call_workers("kvcomm_check_engine", "doctor", [token + 1 for token in ids], gaps)
    assert right < 1e-3
    assert wrong > 0.3
    assert inprocess_engine.call_workers("kvcomm_check_engine", "nobody", list(ids), gaps) == [None]
