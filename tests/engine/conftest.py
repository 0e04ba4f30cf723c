"""One real engine for the whole session, closed at its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from tests.engine.helpers import Client

os.environ.setdefault("KVCOMM_PROGRESS", "0")
os.environ.setdefault("KVCOMM_FAULT_INJECTION", "1")


@pytest.fixture(scope="session")
def engine(demo_model: Path) -> Iterator[InProcessEngine]:
    """SmolLM2 in float32 with rotation-only reuse, repair on, nothing left to chance."""
    reuse = ReuseConfig(policy="aligned", audit_rate=0.0, store_bytes=1 << 30, min_segment_tokens=1)
    engine = InProcessEngine(EngineConfig(model=str(demo_model), max_model_len=2048, max_num_seqs=16, reuse=reuse))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def client(engine: InProcessEngine) -> Client:
    return Client(engine)


@pytest.fixture
def session(request: pytest.FixtureRequest) -> str:
    """A session key of the test's own, so that tests share nothing but the engine."""
    return str(request.node.nodeid)[-200:]
