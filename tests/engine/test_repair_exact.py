"""Where the KV that it attends to is exact, the repair pass gives exactly what a dense run gives."""

from __future__ import annotations

import pytest

from kvcomm_integrations.engines.inprocess import InProcessEngine
from tests.engine.helpers import QUESTIONS, Client

pytestmark = [pytest.mark.engine, pytest.mark.served]


def _gaps(count: int, tokens: int, block: int) -> list[list[int]]:
    """``count`` gaps over ``tokens`` tokens; some end or begin at block borders, some span one, some have one token."""
    if count == 1:
        return [[block - 3, block + 5]]
    if count == 4:
        return [[0, 5], [block - 1, block], [block + 7, 2 * block], [tokens - 1, tokens]]
    if count == 2:
        return [[block - 3, block + 5], [tokens - 9, tokens]]
    step = tokens // count
    return [[i * step + 1, i * step + 3 + i % 5] for i in range(count)]


def check_repair(engine: InProcessEngine, client: Client, block: int, count: int) -> None:
    tokens = 3 * max(block, 96) + 8
    ids = list(client.encode(" ".join(QUESTIONS) * 4)[:tokens])
    [difference] = engine.call_workers("kvcomm_check_repair", ids, _gaps(count, tokens, block))
    assert difference == {"keys": 0.0, "values": 0.0, "hidden": 0.0}


@pytest.mark.parametrize("count", [1, 4, 32])
def test_repair_is_bit_exact_over_exact_kv(engine: InProcessEngine, client: Client, count: int) -> None:
    check_repair(engine, client, 128, count)


@pytest.mark.parametrize("count", [2, 4, 32])
def test_what_joins_the_steps_own_forward_agrees_like_any_batch(
    engine: InProcessEngine, client: Client, count: int
) -> None:
    """The engine's kernel splits a row's context between threads as it suits the whole batch: equal to rounding."""
    ids = list(client.encode(" ".join(QUESTIONS) * 4)[:392])
    gaps = [gap for gap in _gaps(count, 392, 128) if gap[1] - gap[0] > 1]
    [difference] = engine.call_workers("kvcomm_check_repair", ids, gaps, True)
    assert max(difference.values()) < 1e-4


def test_single_token_gaps_agree_like_decoding_does(engine: InProcessEngine, client: Client) -> None:
    """Rows of one token take the decoding kernel, which splits the context when there are many: equal to rounding."""
    ids = list(client.encode(" ".join(QUESTIONS) * 4)[:320])
    [difference] = engine.call_workers("kvcomm_check_repair", ids, [[i * 10 + 1, i * 10 + 2] for i in range(32)])
    assert max(difference.values()) < 1e-3
