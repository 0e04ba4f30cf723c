"""With compilation on, as vLLM has it on a GPU by default: dense answers are plain vLLM's, and reuse works.

On a CPU vLLM compiles with inductor. The compiled forward reads its inputs as the types it was compiled for, without
looking at them: what is wrong there shows in no shape and no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.wire import Mode
from tests.engine.helpers import END, QUESTIONS, ROLES, Client, system
from tests.engine.plain import plain_answers

pytestmark = pytest.mark.engine
GREEDY = SamplingOptions(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def compiled(tiny_model: Path) -> Iterator[Client]:
    reuse = ReuseConfig(only_if_faster=False, policy="aligned", idle_budget=0, min_segment_tokens=1)
    config = EngineConfig(
        model=str(tiny_model),
        dtype="float32",
        max_model_len=1024,
        kv_cache_bytes=1 << 28,
        enforce_eager=False,
        reuse=reuse,
    )
    engine = InProcessEngine(config)
    yield Client(engine)
    engine.close()


def test_dense_answers_are_plain_vllms(compiled: Client, tiny_model: Path, tmp_path: Path) -> None:
    prompts = [
        compiled.prompt(system(agent), ("user_question", compiled.encode(question)), END)
        for agent in ROLES
        for question in QUESTIONS
    ]
    plain = plain_answers(tiny_model, [p.token_ids for p in prompts], 12, tmp_path, enforce_eager=False)
    for mode in (Mode.DENSE, Mode.OBSERVE):
        ours = [
            compiled.ask(p, agent="x", session=f"{mode}", mode=mode, salt=f"{mode}{n}", sampling=GREEDY).ids
            for n, p in enumerate(prompts)
        ]
        assert ours == plain


@pytest.mark.parametrize("gaps", [[[125, 126]], [[125, 133]], [[8, 72], [127, 128], [200, 392]]])
def test_repair_agrees_with_a_forward_of_the_whole(compiled: Client, gaps: list[list[int]]) -> None:
    ids = list(compiled.encode(" ".join(QUESTIONS) * 4)[:392])
    [difference] = compiled.engine.call_workers("kvcomm_check_repair", ids, gaps)
    assert max(difference.values()) < 1e-4


def test_what_is_loaded_back_and_repaired_gives_the_dense_answer(compiled: Client) -> None:
    question = compiled.encode(" ".join(QUESTIONS))
    prompt = compiled.prompt(system("writer"), ("user_question", question), END)
    dense = compiled.ask(prompt, agent="w", session="back", sampling=GREEDY)
    compiled.engine.drain()
    compiled.engine.reset_prefix_cache()
    again = compiled.ask(prompt, agent="w", session="back", sampling=GREEDY)
    assert again.report.loaded > 0
    assert again.report.repaired > 0
    assert again.ids == dense.ids


def test_a_second_agent_loads_and_repairs(compiled: Client) -> None:
    question = compiled.encode(" ".join(QUESTIONS))
    first = compiled.prompt(system("planner"), ("user_question", question), END)
    second = compiled.prompt(system("solver"), ("user_question", question), END)
    compiled.ask(first, agent="p", session="second")
    report = compiled.ask(second, agent="s", session="second").report
    assert report.loaded > 100
    assert 0 < report.repaired < 100
