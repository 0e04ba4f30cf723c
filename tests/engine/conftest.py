"""One real engine for the whole session, closed at its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from tests.engine.helpers import Client
from tests.engine.served import BOTH, BOTH_AT_LENGTH, ServedEngine, connect, kvcomm_serve, running

os.environ.setdefault("KVCOMM_PROGRESS", "0")
os.environ.setdefault("KVCOMM_FAULT_INJECTION", "1")
os.environ.setdefault("KVCOMM_ADMIN_KEY", "the key of the operator of tests")


REUSE = ReuseConfig(only_if_faster=False, policy="aligned", idle_budget=0, store_bytes=1 << 30, min_segment_tokens=1)
"""Rotation-only reuse, repair on, nothing left to chance."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests marked ``served`` on the engine in this process and on one behind HTTP, there maybe at length only."""
    mark = metafunc.definition.get_closest_marker("served")
    if "engine" in metafunc.fixturenames and mark:
        kinds = BOTH_AT_LENGTH if mark.kwargs.get("at_length") else BOTH
        metafunc.parametrize("engine", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> InProcessEngine | ServedEngine:
    """SmolLM2 in this process, or a tiny random model behind ``kvcomm serve``."""
    name = "served_engine" if getattr(request, "param", BOTH[0]) == "served" else "inprocess_engine"
    found: InProcessEngine | ServedEngine = request.getfixturevalue(name)
    return found


@pytest.fixture(scope="session")
def inprocess_engine(demo_model: Path) -> Iterator[InProcessEngine]:
    engine = InProcessEngine(
        EngineConfig(dtype="float32", model=str(demo_model), max_model_len=2048, max_num_seqs=16, reuse=REUSE)
    )
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def served_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    log = tmp_path_factory.mktemp("served") / "server.log"
    options = ["--max-model-len", "2048", "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(256 << 20)]
    with kvcomm_serve(tiny_model, ["--reuse", REUSE.model_dump_json(), *options], log) as served:
        engine = connect(tiny_model, served.url, reuse=REUSE)
        yield engine
        engine.close()


@pytest.fixture(scope="session", params=BOTH_AT_LENGTH)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InProcessEngine | ServedEngine]:
    """SmolLM2 in this process and, in reliability runs, served: for tests that want more than random answers."""
    if request.param == "inprocess":
        yield request.getfixturevalue("inprocess_engine")
        return
    config = EngineConfig(
        dtype="float32", model=str(request.getfixturevalue("demo_model")), max_model_len=2048, reuse=REUSE
    )
    with running("served", config, tmp_path_factory.mktemp("trained")) as engine:
        yield engine


@pytest.fixture(scope="session")
def client(engine: InProcessEngine | ServedEngine) -> Client:
    return Client(engine)


@pytest.fixture
def session(request: pytest.FixtureRequest) -> str:
    """A session key of the test's own, so that tests share nothing but the engine."""
    return str(request.node.nodeid)[-200:]
