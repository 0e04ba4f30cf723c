"""Settings of an engine that contradict each other."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvcomm_integrations.config import EngineConfig


def test_state_files_are_for_the_engine_in_this_process() -> None:
    with pytest.raises(ValidationError, match="kvcomm state load"):
        EngineConfig(model="m", base_url="http://localhost:8000/v1", state_path="learned")
    with pytest.raises(ValidationError, match="needs state_path"):
        EngineConfig(model="m", save_state_on_close=True)
    assert EngineConfig(model="m", state_path="a").key() != EngineConfig(model="m", state_path="b").key()
