"""Two pipeline stages: contiguous plans without repair, the same on both, over the layers that each one holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from tests.engine.helpers import END, QUESTIONS, Client, system

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two stages need two cores"),
]


@pytest.fixture(scope="module")
def stages(tiny_model: Path) -> Iterator[Client]:
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    reuse = ReuseConfig(audit_rate=0.0, learn_rate=0.0, min_segment_tokens=1)
    config = EngineConfig(
        model=str(tiny_model), max_model_len=1024, reuse=reuse, engine_args={"pipeline_parallel_size": 2}
    )
    engine = InProcessEngine(config)
    yield Client(engine)
    engine.close()
    patch.undo()


def test_the_beginning_and_a_content_after_it_are_loaded_by_both_stages(stages: Client) -> None:
    question = stages.encode(" ".join(QUESTIONS))
    for number in range(2):  # twice: the solver's own beginning is known from the second request on
        text = (*question, *stages.encode(f" Case {number}."))
        for agent in ("planner", "solver"):
            prompt = stages.prompt(system(agent), ("user_question", text), END)
            answer = stages.ask(prompt, agent=agent, session=f"pp-{number}", tokens=4)
    report = answer.report
    assert report.repaired == 0
    assert report.loaded > len(question) // 2
    first, second = stages.engine.call_workers("kvcomm_stats")
    for field in ("references", "loaded_tokens"):
        assert first[field] == second[field] > 0
    assert "pipeline" in str(stages.engine.repair_refusal)


def test_loading_into_the_same_context_changes_nothing(stages: Client) -> None:
    question = stages.encode(" ".join(QUESTIONS) + " Once more.")
    prompt = stages.prompt(system("writer"), ("user_question", question), END)
    dense = stages.ask(prompt, agent="w", session="same", tokens=16)
    stages.engine.reset_prefix_cache()
    loaded = stages.ask(prompt, agent="w", session="same", tokens=16)
    assert loaded.report.loaded > 0
    assert loaded.ids == dense.ids
