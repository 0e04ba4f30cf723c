"""An hour of sessions in minutes: memory of engine and client stays flat."""

from __future__ import annotations

import os
import random
from pathlib import Path

import psutil
import pytest

from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.wire import Mode
from tests.engine.helpers import END, QUESTIONS, Client, system

pytestmark = [pytest.mark.engine, pytest.mark.reliability]

ROUNDS, REQUESTS = 6, 120
"""Enough requests for the budgets to be full after the first round."""


def resident() -> int:
    """Bytes of this process and its children."""
    me = psutil.Process(os.getpid())
    return sum(process.memory_info().rss for process in [me, *me.children(recursive=True)])


def test_memory_stays_flat(tiny_model: Path) -> None:
    reuse = ReuseConfig(
        only_if_faster=False,
        policy="ridge",
        store_bytes=8 << 20,
        state_bytes=8 << 20,
        learn_rate=0.3,
        audit_rate=0.05,
        session_ttl_s=5.0,
    )
    config = EngineConfig(
        dtype="float32", model=str(tiny_model), max_model_len=512, max_num_seqs=16, kv_cache_bytes=1 << 28, reuse=reuse
    )
    engine = InProcessEngine(config)
    client = Client(engine)
    rnd = random.Random(1)
    sizes = []
    for turn in range(ROUNDS):
        for number in range(REQUESTS):
            name = f"{turn}-{number // 4}"
            question = client.encode(f"{QUESTIONS[number // 4 % 3]} Case {name}.")
            prompt = client.prompt(
                system(["planner", "solver", "critic", "writer"][number % 4]), ("user_question", question), END
            )
            client.ask(
                prompt,
                agent=f"agent {turn} {number % 40}",
                tenant=f"tenant {name}" if rnd.random() < 0.3 else "default",
                session=name,
                mode=rnd.choice([Mode.AUTO, Mode.AUTO, Mode.OBSERVE]),
                tokens=3,
            )
        sizes.append(resident())
        [stats] = engine.call_workers("kvcomm_stats")
        assert stats["store_bytes"] <= reuse.store_bytes
        assert sum(stats["policies"].values()) <= reuse.state_bytes
    engine.drain()
    assert engine.scheduler_snapshot.usage == 0
    engine.close()
    print("\nresident MiB after each round:", [size >> 20 for size in sizes])
    assert sizes[-1] - sizes[1] < 24 << 20
