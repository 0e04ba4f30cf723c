"""What a real engine has learned: saved, merged, loaded and used by the next one, in this process and served.

A served engine has no ``state_path``, so the warm start is in this process only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcomm_integrations import cli
from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.errors import StateFileError
from kvcomm_integrations.state.file_commands import merge_files
from kvcomm_integrations.state.files import read_manifest, read_state, write_state
from kvcomm_integrations.state.learned import LearnedState
from kvcomm_integrations.wire import Mode
from tests.engine.helpers import END, QUESTIONS, Client, system
from tests.engine.served import BOTH, STATE_FOLDERS, ServedEngine, running

pytestmark = pytest.mark.engine

LESSONS = tuple(f"{question} This is case {number}." for number, question in enumerate(QUESTIONS))


def config(model: Path, **options: object) -> EngineConfig:
    reuse = ReuseConfig(only_if_faster=False, idle_budget=0, min_segment_tokens=1, state_bytes=64 << 20)
    return EngineConfig(
        dtype="float32", model=str(model), max_model_len=512, kv_cache_bytes=64 << 20, reuse=reuse, **options
    )


@pytest.fixture(scope="module", params=BOTH)
def learner(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    with running(request.param, config(tiny_model), tmp_path_factory.mktemp("learner")) as engine:
        yield Client(engine)


def teach(client: Client, lessons: tuple[str, ...], session: str, tenant: str = "default") -> None:
    for number, lesson in enumerate(lessons):
        question = ("user_question", client.encode(lesson))
        who = {"session": f"{session}-{number}", "tenant": tenant, "tokens": 2}
        client.ask(client.prompt(system("planner"), question, END), agent="p", **who)
        client.ask(client.prompt(system("solver"), question, END), agent="s", mode=Mode.OBSERVE, **who)
    client.engine.drain()


def assert_same(a: LearnedState, b: LearnedState) -> None:
    assert [(e.edge, e.examples, e.rows) for e in a.edges] == [(e.edge, e.examples, e.rows) for e in b.edges]
    for mine, theirs in zip(a.edges, b.edges, strict=True):
        torch.testing.assert_close(mine.mean, theirs.mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.scatter, theirs.scatter, rtol=1e-3, atol=1e-3)


def test_two_replicas_merged_know_what_one_would(learner: Client, tmp_path: Path) -> None:
    """Half of the lessons each, merged, against all of them in one engine."""
    engine = learner.engine
    for name, lessons in {"a": LESSONS[:2], "b": LESSONS[2:], "all": LESSONS}.items():
        engine.clear_state()
        teach(learner, lessons, session=f"merge-{name}")
        assert engine.save_state(tmp_path / name).examples == len(lessons)
    assert_same(merge_files([tmp_path / "a", tmp_path / "b"]), read_state(tmp_path / "all"))
    engine.clear_state()
    engine.load_state(tmp_path / "a")
    engine.load_state(tmp_path / "b", merge=True)
    engine.save_state(tmp_path / "merged live")
    assert_same(read_state(tmp_path / "merged live"), read_state(tmp_path / "all"))


def test_a_warm_engine_knows_its_edges_from_the_start(learner: Client, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "state"
    learner.engine.clear_state()
    teach(learner, LESSONS, session="warm")
    learner.engine.save_state(path)
    engine = InProcessEngine(config(tiny_model, state_path=str(path), save_state_on_close=True))
    warm = Client(engine)
    try:
        question = ("user_question", warm.encode(LESSONS[0]))
        warm.ask(warm.prompt(system("planner"), question, END), agent="p")
        report = warm.ask(warm.prompt(system("solver"), question, END), agent="s").report
        [segment] = [segment for segment in report.segments if segment.name == "user_question"]
        assert segment.loaded > 0
        assert segment.examples == len(LESSONS)
        assert segment.confidence is not None
        teach(warm, LESSONS[:1], session="more")
    finally:
        engine.close()
    assert read_manifest(path).examples == len(LESSONS) + 1


def test_one_tenants_state_alone(learner: Client, tmp_path: Path) -> None:
    engine = learner.engine
    engine.clear_state()
    for tenant, count in (("acme", 1), ("other", 2)):
        teach(learner, LESSONS[:count], session="tenants", tenant=tenant)
    assert engine.save_state(tmp_path / "acme", tenant="acme").examples == 1
    assert {edge.tenant for edge in read_manifest(tmp_path / "acme").edges} == {"acme"}
    with pytest.raises(StateFileError, match="tenant 'acme', not of tenant 'other'"):
        engine.load_state(tmp_path / "acme", tenant="other")
    assert engine.clear_state(tenant="acme").edges == 1
    assert engine.save_state(tmp_path / "rest").examples == 2
    engine.load_state(tmp_path / "acme", tenant="acme")  # replaces that tenant's edges only
    assert engine.save_state(tmp_path / "both").examples == 3


def test_what_does_not_fit_is_refused_and_changes_nothing(learner: Client, tmp_path: Path) -> None:
    engine, path = learner.engine, tmp_path / "state"
    engine.clear_state()
    teach(learner, LESSONS[:1], session="refuse")
    engine.save_state(path)
    state = read_state(path)
    other = tmp_path / "other"
    write_state(other, LearnedState(state.model.model_copy(update={"weights": "beef"}), "ridge", state.heads, ()))
    with pytest.raises(StateFileError, match=f"weights 'beef', not '{state.model.weights}'"):
        engine.load_state(other)
    other.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(StateFileError, match="truncated"):
        engine.load_state(other)
    if isinstance(engine, InProcessEngine):  # a served engine takes names of files in its own folder
        with pytest.raises(StateFileError, match="No such file"):
            engine.load_state(tmp_path / "nowhere" / "state")
        with pytest.raises(StateFileError, match="could not be written"):
            engine.save_state(tmp_path / "nowhere" / "state")
    assert engine.save_state(path).examples == 1


def test_the_command_line_keeps_a_servers_state(
    learner: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``kvcomm state`` as an operator types it, against a real server."""
    engine = learner.engine
    if not isinstance(engine, ServedEngine):
        pytest.skip("orders are for servers")
    engine.clear_state()
    teach(learner, LESSONS[:2], session="operator")
    folder, server = STATE_FOLDERS[engine.root], ["--server", f"{engine.root}/v1"]
    assert cli.main(["state", "save", "learned", *server]) == 0
    assert cli.main(["state", "show", str(folder / "learned")]) == 0
    assert cli.main(["state", "clear", *server]) == 0
    assert engine.save_state(tmp_path / "empty").edges == 0
    assert cli.main(["state", "load", "learned", *server]) == 0
    assert cli.main(["state", "load", "learned", "--merge", *server]) == 0
    said = capsys.readouterr().out
    edges = read_manifest(folder / "learned").edges
    assert said.count(f"learned: {len(edges)} edges, 2 examples\n") == 3
    assert f"{len(edges)} edges forgotten\n" in said
    assert engine.save_state(tmp_path / "twice").examples == 4
    assert cli.main(["state", "load", "unknown", *server]) == 2
    assert "No such file" in capsys.readouterr().err
