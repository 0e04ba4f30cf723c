"""The doctor's two-agent run on the real engine, which it starts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcomm_integrations.doctor.finding import State
from kvcomm_integrations.doctor.smoke import smoke

pytestmark = pytest.mark.engine


def test_smoke_run_is_good(demo_model: Path) -> None:
    findings = {finding.name: finding for finding in smoke(str(demo_model))}
    assert {finding.state for finding in findings.values()} == {State.GOOD}, findings
    assert set(findings) == {"Engine", "Cache layout", "Rotary positions", "Repair pass", "Reuse"}
