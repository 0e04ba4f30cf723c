"""When a request must wait a step, so that nothing attends over KV that is not there yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvcomm_integrations.connector.scheduler import hits_unwritten


def request(hashes: str, computed: int = 0, status: Any = RequestStatus.RUNNING) -> Any:
    return SimpleNamespace(block_hashes=list(hashes), num_computed_tokens=computed, status=status)


@pytest.mark.parametrize(
    ("other", "unwritten"),
    [
        (request("ab"), True),
        (request("ab", 16), True),
        (request("ab", 32), False),
        (request("ax"), True),  # only the first block is shared, and it is not written
        (request("ax", 16), False),
        (request("xy"), False),
        (request(""), False),
        (request("ab", 0, RequestStatus.WAITING), False),
        (request("abc", 40), False),
    ],
)
def test_any_block_of_the_hit_may_be_unwritten(other: Any, unwritten: bool) -> None:
    mine = request("abd", 0, RequestStatus.WAITING)
    assert hits_unwritten(mine, 32, 16, [mine, other]) is unwritten
    assert not hits_unwritten(mine, 0, 16, [other])
