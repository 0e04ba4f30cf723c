"""Two tensor-parallel ranks take the same decision and give what one rank gives."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prometheus_client import REGISTRY

from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.errors import EngineError
from kvcomm_integrations.state.files import read_manifest, read_state
from kvcomm_integrations.wire import Mode
from tests.engine.helpers import END, QUESTIONS, Client, system
from tests.engine.served import BOTH_AT_LENGTH, ServedEngine, counts, running

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores"),
]


@pytest.fixture(scope="module", params=BOTH_AT_LENGTH)
def parallel(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Client]:
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    reuse = ReuseConfig(only_if_faster=False, idle_budget=0)
    config = EngineConfig(
        dtype="float32", model=str(tiny_model), max_model_len=1024, tensor_parallel_size=2, reuse=reuse
    )
    with running(request.param, config, tmp_path_factory.mktemp("parallel")) as engine:
        yield Client(engine)
    patch.undo()


def test_both_ranks_load_repair_and_learn(parallel: Client) -> None:
    for number in range(3):
        question = parallel.encode(" ".join(QUESTIONS) + f" This is case {number}.")
        first = parallel.prompt(system("planner"), ("user_question", question), END)
        second = parallel.prompt(system("solver"), ("user_question", question), END)
        session = f"tp-{number}"
        parallel.ask(first, agent="p", session=session, tokens=4)
        parallel.ask(second, agent="s", session=session, tokens=4, mode=Mode.OBSERVE)
    reused = parallel.ask(
        parallel.prompt(system("critic"), ("user_question", question), END), agent="c", session=session, tokens=4
    )
    assert reused.report.loaded > len(question) // 2
    ranks = parallel.engine.call_workers("kvcomm_stats")
    assert len(ranks) == 2
    for field in ("references", "loaded_tokens", "repaired_tokens", "verified"):
        assert ranks[0][field] == ranks[1][field]
    assert ranks[0]["loaded_tokens"] == reused.report.loaded
    assert ranks[0]["policies"] == ranks[1]["policies"] != {"ridge": 0}
    for rank in range(2):
        labels = {"model_name": parallel.engine.config.model, "engine": "0", "rank": str(rank)}
        if isinstance(parallel.engine, ServedEngine):
            told = counts(parallel.engine.root, "vllm:kvcomm_store_bytes", "rank")[str(rank)]
        else:
            told = REGISTRY.get_sample_value("vllm:kvcomm_store_bytes", labels)
        assert told == ranks[rank]["store_bytes"]


def test_what_all_ranks_have_learned_is_one_file(parallel: Client, tmp_path: Path) -> None:
    for agent in ("planner", "solver"):
        prompt = parallel.prompt(system(agent), ("user_question", parallel.encode(QUESTIONS[0])), END)
        parallel.ask(prompt, agent=agent, session="state", tokens=2, mode=Mode.OBSERVE)
    parallel.engine.drain()
    saved = parallel.engine.save_state(tmp_path / "a")
    assert saved.examples >= 1
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert read_manifest(tmp_path / "a").whole
    parallel.engine.clear_state()
    assert parallel.engine.load_state(tmp_path / "a") == saved
    parallel.engine.save_state(tmp_path / "b")
    first, second = (read_state(tmp_path / name) for name in "ab")
    for mine, theirs in zip(first.edges, second.edges, strict=True):
        assert mine.edge == theirs.edge
        assert torch.equal(mine.scatter, theirs.scatter)


def test_repair_agrees_with_a_dense_run_on_every_rank(parallel: Client) -> None:
    ids = list(parallel.encode(" ".join(QUESTIONS) * 2)[:260])
    for difference in parallel.engine.call_workers("kvcomm_check_repair", ids, [[3, 9], [126, 131], [200, 230]]):
        assert max(difference.values()) < 1e-5


def test_loading_into_the_same_context_changes_nothing(parallel: Client) -> None:
    question = parallel.encode(" ".join(QUESTIONS) + " Once more.")
    prompt = parallel.prompt(system("writer"), ("user_question", question), END)
    dense = parallel.ask(prompt, agent="w", session="same", tokens=16)
    parallel.engine.reset_prefix_cache()
    loaded = parallel.ask(prompt, agent="w", session="same", tokens=16)
    assert loaded.report.loaded > 0
    assert loaded.ids == dense.ids


@pytest.mark.parametrize("seam", ["correct", "reference", "repair"])
def test_a_fault_of_one_rank_is_answered_by_all(parallel: Client, seam: str) -> None:
    """Ranks agree before each batch; else one would wait for a batch of the other that is another or never comes."""
    if seam == "repair" and isinstance(parallel.engine, ServedEngine):
        pytest.skip("a client of a server gets an error for want of a repair pass")
    question = parallel.encode(" ".join(QUESTIONS) + f" Now with a fault in {seam}.")
    parallel.ask(parallel.prompt(system("planner"), ("user_question", question), END), agent="p", session=seam)
    prompt = parallel.prompt(system("solver"), ("user_question", question), END)
    parallel.engine.call_workers("kvcomm_inject_fault", seam, "raise", 1, 1)
    answer = parallel.ask(prompt, agent="s", session=seam, respond=False)
    dense = parallel.ask(prompt, session=seam, mode=Mode.DENSE, salt=f"dense {seam}")
    assert answer.report.loaded == 0
    assert answer.report.reason.startswith("computed densely after a fault")
    assert answer.ids == dense.ids
    again = parallel.ask(prompt, agent="s", session=seam)
    assert again.report.loaded > 0


def test_a_fault_of_one_rank_in_an_audit_is_answered_by_all(parallel: Client) -> None:
    question = parallel.encode(" ".join(QUESTIONS) + " Now with a fault in an audit.")
    parallel.ask(parallel.prompt(system("planner"), ("user_question", question), END), agent="p", session="audit")
    prompt = parallel.prompt(system("solver"), ("user_question", question), END)
    request = parallel.request(prompt, agent="s", session="audit", mode=Mode.OBSERVE, respond=False)
    request = replace(request, params=request.params.model_copy(update={"audit": ("aligned",)}))
    parallel.engine.call_workers("kvcomm_take_audits")
    parallel.engine.call_workers("kvcomm_inject_fault", "audit", "raise", 1, 1)
    for audits in (0, 1):  # the second time without a fault
        parallel.run(request)
        parallel.engine.drain()
        assert len(max(parallel.engine.call_workers("kvcomm_take_audits"), key=len)) == audits


@pytest.mark.reliability
def test_a_fault_of_one_rank_inside_the_model_stops_the_engine_at_once(parallel: Client) -> None:
    """The other rank waits for it there, as in any forward of vLLM's own. The next call starts the engine anew."""
    if isinstance(parallel.engine, ServedEngine):
        pytest.skip("a server that has ended is not started again by its client")
    question = parallel.encode("Now with a fault in the forward. " + " ".join(QUESTIONS))
    parallel.ask(parallel.prompt(system("planner"), ("user_question", question), END), agent="p", session="forward")
    prompt = parallel.prompt(system("solver"), ("user_question", question), END)
    parallel.engine.call_workers("kvcomm_inject_fault", "forward", "raise", 1, 1)
    started = time.monotonic()
    with pytest.raises(EngineError, match="died"):
        parallel.ask(prompt, agent="new", session="forward")
    assert time.monotonic() - started < 60
    assert parallel.ask(prompt, agent="new", session="forward").report.loaded == 0
