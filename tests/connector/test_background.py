"""What a worker computes ahead: in order, once, with nobody waiting, and never harmful."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from kvcomm_integrations.connector.worker.background import Background
from kvcomm_integrations.connector.worker.learner import LeverageTable
from kvcomm_integrations.reuse.edge import Edge, Readiness
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.policies import create_policy
from kvcomm_integrations.reuse.references import Reference

EDGE = Edge("a", "b", "text")


def test_a_later_task_with_the_same_key_replaces_one_that_waits() -> None:
    background, gate, done = Background(), threading.Event(), []
    background.submit("first", lambda: (gate.wait(10), done.append("first")))
    for number in range(3):
        background.submit("same", lambda number=number: done.append(number))
    background.submit("other", lambda: done.append("other"))
    assert not background.wait(0.01)
    gate.set()
    assert background.wait(10)
    assert done == ["first", 2, "other"]


def test_a_failing_task_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    background, done = Background(), []
    with caplog.at_level(logging.ERROR):
        background.submit(1, lambda: 1 / 0)
        background.submit(2, lambda: done.append(2))
        assert background.wait(10)
    assert done == [2]
    assert "background computation failed" in caplog.text


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="this platform has no priorities")
def test_it_yields_to_the_engine() -> None:
    background, seen = Background(), {}
    background.submit(1, lambda: seen.update(nice=os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    assert background.wait(10)
    assert seen["nice"] == 19
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19


def test_a_leverage_is_computed_once_until_the_edge_learns() -> None:
    torch.manual_seed(0)
    policy, book = create_policy("ridge"), LeverageTable()
    kv = KV(torch.randn(3, 2, 20, 4), torch.randn(3, 2, 20, 4))
    reference = Reference(1, *kv, source="a", name="text")
    assert book.of("ridge", policy, EDGE, reference) is None
    policy.observe(EDGE, kv, KV(kv.keys + 1, kv.values))
    book.learned("ridge", EDGE)
    first = book.of("ridge", policy, EDGE, reference)
    assert first == policy.ready(EDGE, kv).leverage
    asked: list[KV | None] = []
    ready = policy.ready
    policy.ready = lambda edge, content=None: (asked.append(content), ready(edge, content))[1]  # type: ignore[method-assign]
    assert book.of("ridge", policy, EDGE, reference) == first
    assert not asked
    policy.observe(EDGE, KV(kv.keys * 3, kv.values), kv)
    book.learned("ridge", EDGE)
    assert book.of("ridge", policy, EDGE, reference) != first
    book.drop(1)
    book.drop(1)


def test_what_was_computed_while_the_edge_learned_is_not_kept() -> None:
    book, reference = LeverageTable(), Reference(1, *torch.randn(2, 3, 2, 20, 4), source="a", name="text")
    values = iter((0.25, 0.5))

    class Learning:
        def ready(self, edge: Edge, content: KV | None = None) -> Readiness:
            if content is not None:
                book.learned("p", EDGE)
            return Readiness(1, True, leverage=None if content is None else next(values))

    policy: Any = Learning()
    assert [book.of("p", policy, EDGE, reference) for _ in range(2)] == [0.25, 0.5]


LEAVING = """
import time, torch
from kvcomm_integrations.connector.worker.background import Background

def work():
    for _ in range(12):
        torch.linalg.qr(torch.randn(64, 128, 128))

background = Background()
background.submit("solve", work)
background.submit("waiting", work)
time.sleep(0.2)
"""


def test_a_process_ends_cleanly_while_something_is_computed() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_runs_after_close() -> None:
    background, ran = Background(), []
    background.submit("first", lambda: ran.append("first"))
    assert background.wait(10)
    background.close()
    background.close()
    background.submit("second", lambda: ran.append("second"))
    assert ran == ["first"]


def test_a_task_works_on_the_stream_it_was_submitted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a GPU could read what was learned before it is there, and use a map before it is solved."""
    here = threading.local()
    here.stream = "the forward's"

    class Using:
        """Makes a stream current in the thread that enters."""

        def __init__(self, stream: str) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            here.stream = self.stream

        def __exit__(self, *error: object) -> None:
            del here.stream

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: getattr(here, "stream", "nobody's"))
    monkeypatch.setattr(torch.cuda, "stream", Using)
    background, seen = Background(), []
    background.submit(1, lambda: seen.append(torch.cuda.current_stream()))
    assert background.wait(10)
    here.stream = "another"
    background.submit(1, lambda: seen.append(torch.cuda.current_stream()))
    assert background.wait(10)
    assert seen == ["the forward's", "another"]


@pytest.mark.gpu
def test_on_a_gpu_too() -> None:
    background, seen = Background(), []
    with torch.cuda.stream(torch.cuda.Stream()):
        wanted = torch.cuda.current_stream()
        background.submit(1, lambda: seen.append(torch.cuda.current_stream()))
    assert background.wait(10)
    assert seen == [wanted]
