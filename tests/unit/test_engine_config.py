"""Settings of an engine that contradict each other."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from kvcomm_integrations.config import EngineConfig, HttpConfig, ReuseConfig


def test_state_files_are_for_the_engine_in_this_process() -> None:
    with pytest.raises(ValidationError, match="kvcomm state load"):
        EngineConfig(model="m", base_url="http://localhost:8000/v1", state_path="learned")
    with pytest.raises(ValidationError, match="needs state_path"):
        EngineConfig(model="m", save_state_on_close=True)
    assert EngineConfig(model="m", state_path="a").key() != EngineConfig(model="m", state_path="b").key()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ReuseConfig(max_repair_shares=0.5), "no setting 'max_repair_shares'; did you mean 'max_repair_share'"),
        (lambda: EngineConfig(model="m", tensor_paralel_size=2), "did you mean 'tensor_parallel_size'"),
        (lambda: EngineConfig(model="m", reuse={"polcy": "ridge"}), "did you mean 'policy'"),
        (lambda: HttpConfig(zzz=1), "HttpConfig has no setting 'zzz'; there are connect_timeout, "),
    ],
)
def test_a_misspelt_setting_is_named_with_the_nearest_one(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
