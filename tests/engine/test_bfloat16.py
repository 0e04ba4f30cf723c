"""An engine in bfloat16: whatever way this machine's kernels pack the cache, contents are loaded and repaired."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.wire import Mode
from tests.engine.conftest import REUSE
from tests.engine.helpers import END, QUESTIONS, ROLES, Client
from tests.engine.test_repair_exact import _gaps

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def bfloat16(demo_model: Path) -> Iterator[Client]:
    config = EngineConfig(dtype="bfloat16", model=str(demo_model), max_model_len=2048, reuse=REUSE)
    engine = InProcessEngine(config)
    yield Client(engine)
    engine.close()


def test_later_agents_load_and_answer_as_dense(bfloat16: Client) -> None:
    question = bfloat16.encode(" ".join(QUESTIONS))
    loaded = []
    for agent, role in ROLES.items():
        head = f"<|im_start|>system\n{role}<|im_end|>\n<|im_start|>user\n"
        prompt = bfloat16.prompt(head, ("user_question", question), END)
        reused = bfloat16.ask(prompt, agent=agent, session="s", tokens=4)
        dense = bfloat16.ask(prompt, agent=agent, session=agent, mode=Mode.DENSE, salt=agent, tokens=4)
        assert reused.ids == dense.ids
        loaded.append(reused.report.loaded)
    assert loaded[0] == 0 and min(loaded[1:]) > len(question) // 2
    [stats] = bfloat16.engine.call_workers("kvcomm_stats")
    assert stats["layout"] and not stats["disabled"]
    assert stats["verified"]  # keys of equal tokens agree


@pytest.mark.parametrize("count", [1, 4, 32])
@pytest.mark.parametrize("joined", [False, True])
def test_repair_agrees_to_rounding(bfloat16: Client, count: int, joined: bool) -> None:
    """Small batches take other matrix kernels, which add up in another order; unrepaired tokens would be off by 7."""
    ids = list(bfloat16.encode(" ".join(QUESTIONS) * 4)[:392])
    gaps = _gaps(2 if joined and count == 1 else count, 392, 128)
    gaps = [gap for gap in gaps if gap[1] - gap[0] > 1] if joined else gaps
    [difference] = bfloat16.engine.call_workers("kvcomm_check_repair", ids, gaps, joined)
    assert max(difference["keys"], difference["values"]) <= 0.5
    assert difference["hidden"] <= 1
