"""Two stages of a pipeline: no repair pass, so plans are contiguous; each stage keeps its own layers.

vLLM's CPU runner makes the buffers between stages when it warms up a compiled model only, and fails without them in the
first step; hence the compilation mode, with a backend that compiles nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.errors import StateFileError
from kvcomm_integrations.wire import Mode, RequestReport
from tests.engine.helpers import END, QUESTIONS, Client, system
from tests.engine.plain import plain_answers

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two stages need two cores"),
]

MATURE = 2
"""Examples from which on a content is loaded without repair."""
GREEDY = SamplingOptions(max_tokens=12, temperature=0, ignore_eos=True)
REUSE = ReuseConfig(only_if_faster=False, idle_budget=0, mature_examples=MATURE)


@pytest.fixture(scope="module")
def staged(tiny_model: Path) -> Iterator[Client]:
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    stages = {"pipeline_parallel_size": 2, "compilation_config": {"mode": 2, "backend": "eager"}}
    config = EngineConfig(
        dtype="float32",
        model=str(tiny_model),
        max_model_len=1024,
        kv_cache_bytes=256 << 20,
        enforce_eager=False,
        engine_args=stages,
        reuse=REUSE,
    )
    engine = InProcessEngine(config)
    yield Client(engine)
    engine.close()
    patch.undo()


def case(client: Client, number: int, agent: str, session: str) -> RequestReport:
    question = ("user_question", client.encode(f"Case {number}. " + " ".join(QUESTIONS)))
    prompt = client.prompt(system(agent), question, END)
    return client.ask(prompt, agent=agent, session=session, tokens=4).report


def test_a_second_agent_loads_once_its_edge_is_mature(staged: Client) -> None:
    """Its own beginning is copied exactly, the question behind it is loaded from its first token on."""
    reports = []
    for number in range(MATURE + 2):
        assert case(staged, number, "planner", "cases").loaded == 0
        reports.append(case(staged, number, "solver", "cases"))
    *young, mature = reports
    assert [report.loaded for report in young[:MATURE]] == [0] * MATURE
    [question] = [part for part in young[1].segments if part.name == "user_question"]
    assert question.reason == f"no repair pass, and 1 of {MATURE} examples"
    assert mature.repaired == 0
    assert mature.exact > 0
    [question] = [part for part in mature.segments if part.name == "user_question"]
    assert question.loaded == question.end - question.start
    assert question.source == "planner"


def test_each_stage_has_its_own_layers(staged: Client) -> None:
    first, second = staged.engine.call_workers("kvcomm_stats")
    assert first["repair_refusal"] == second["repair_refusal"] == "pipeline parallelism is on"
    for field in ("references", "store_bytes", "loaded_tokens", "edges"):
        assert first[field] == second[field]
    assert first["loaded_tokens"] > 0


def test_what_a_stage_has_learned_cannot_be_saved(staged: Client, tmp_path: Path) -> None:
    with pytest.raises(StateFileError, match="pipeline parallelism"):
        staged.engine.save_state(tmp_path / "state")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.reliability
def test_dense_mode_equals_plain_vllm(staged: Client, tiny_model: Path, tmp_path: Path) -> None:
    prompts = [staged.prompt(system("critic"), ("user_question", staged.encode(text)), END) for text in QUESTIONS]
    plain = plain_answers(tiny_model, [prompt.token_ids for prompt in prompts], 12, tmp_path)
    for number, (prompt, answer) in enumerate(zip(prompts, plain, strict=True)):
        own = {"session": f"dense {number}", "salt": f"dense {number}"}
        assert staged.ask(prompt, mode=Mode.DENSE, sampling=GREEDY, **own).ids == answer
