"""In what order a GPU's streams do the work of a harvest, with stand-ins for streams and events that write it down.

An operation runs at once, as always on a CPU; what is looked at is which stream it was given to, which memory it
touched and what that stream had been told to wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcomm_integrations.connector.metadata import StepMetadata
from kvcomm_integrations.connector.worker.paged_cache import Layout, PagedCache
from kvcomm_integrations.connector.worker.transfer import Arrivals
from kvcomm_integrations.connector.worker.worker import ConnectorWorker
from kvcomm_integrations.planning.jobs import HarvestJob
from kvcomm_integrations.reuse.transfers import ToHost
from tests.connector.test_worker import BLOCK, DIM, HEADS, LAYERS, _fill, _harvest, _worker

START, END = 5, 40


class Stream:
    """A stream that writes down what it is told.

    Args:
        name: its name in the log.
        log: what all streams were told, in order: the stream, what, and the memory or the stream that it is about.
    """

    def __init__(self, name: str, log: list[tuple[str, str, Any]]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, "waits", other.name))


class Gpu(TorchDispatchMode):
    """Two streams, and the memory that each reads and writes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.log: list[tuple[str, str, Any]] = []
        self.main, self.side = Stream("main", self.log), Stream("side", self.log)
        self.current = self.main
        self.done = False
        self.held: list[Any] = []
        """Keeps all memory, so that no address is used twice."""
        gpu = self

        class Event:
            """One that is over when the test says so."""

            def record(self, stream: Stream) -> None:
                gpu.log.append((stream.name, "done", None))

            def query(self) -> bool:
                return gpu.done

            def synchronize(self) -> None:
                gpu.log.append(("host", "waits", "side"))

        empty_like = torch.empty_like
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch.cuda, "stream", self.using)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch, "empty_like", lambda *args, pin_memory=False, **named: empty_like(*args, **named))
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.recorded(tensor, stream))

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """What torch does within is given to this stream."""
        before, self.current = self.current, stream
        yield
        self.current = before

    def recorded(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The allocator keeps the memory of a tensor until this stream has done what it has to."""
        self.log.append((stream.name, "keeps", memory(tensor)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for tensor in tree_leaves((args, kwargs, result)):
                if torch.is_tensor(tensor):
                    self.held.append(tensor.untyped_storage())
                    self.log.append((self.current.name, str(func), memory(tensor)))
        return result

    def places(self, name: str) -> set[int]:
        """The memory that a stream's operations touched."""
        return {what for stream, event, what in self.log if stream == name and event.startswith("aten")}


def memory(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory, whichever part of it the tensor is."""
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.fixture(params=["reference device: cpu", "reference device: gpu"])
def half(request: pytest.FixtureRequest, gpu: Gpu) -> ConnectorWorker:
    """A worker whose cache is arranged as on a GPU and whose harvests go by the side stream."""
    half = _worker()
    half._vllm_config.parallel_config.rank = 0
    cache = PagedCache([torch.zeros(12, HEADS, BLOCK, 2 * DIM) for _ in range(LAYERS)], Layout.GPU)
    assert half.rope is not None
    half.use(cache, half.rope)
    stream: Any = gpu.side
    half._arrivals = Arrivals(lambda kv: ToHost(kv, stream, keep=request.param.endswith("gpu")))
    return half


def caches(half: ConnectorWorker) -> set[int]:
    assert half.cache is not None
    return {memory(layer) for layer in half.cache.layers}


def harvest(half: ConnectorWorker, *, exact: bool) -> None:
    job = HarvestJob(7, (0, 1, 2), START, END, name="text", source="a", scope="", dense=True, exact=exact)
    half.save(StepMetadata(harvests=[job]))


@pytest.mark.parametrize("exact", [False, True])
def test_only_the_stream_of_the_forward_reads_the_paged_cache(half: ConnectorWorker, gpu: Gpu, exact: bool) -> None:
    _fill(half, (0, 1, 2), END, seed=3)
    with gpu:
        harvest(half, exact=exact)
    assert caches(half) <= gpu.places("main")
    assert gpu.places("side") and not caches(half) & gpu.places("side")


@pytest.mark.parametrize("exact", [False, True])
def test_the_side_stream_begins_when_the_copy_is_made(half: ConnectorWorker, gpu: Gpu, exact: bool) -> None:
    with gpu:
        harvest(half, exact=exact)
    sent = gpu.places("main") & gpu.places("side")
    waits = gpu.log.index(("side", "waits", "main"))
    assert sent
    for index, (stream, event, what) in enumerate(gpu.log):
        if event.startswith("aten") and what in sent:
            assert (stream == "side") == (index > waits), "made before, read afterwards, and never touched again"
    assert gpu.log[-1] == ("side", "done", None)


def test_memory_that_the_side_stream_reads_is_kept_for_it(half: ConnectorWorker, gpu: Gpu) -> None:
    """Also if a drop cancels the copy: the allocator must not give the memory to the next operation."""
    with gpu:
        harvest(half, exact=False)
    kept = [index for index, (_, event, _) in enumerate(gpu.log) if event == "keeps"]
    assert {gpu.log[index][2] for index in kept} >= gpu.places("main") & gpu.places("side")
    assert max(kept) < next(i for i, (name, event, _) in enumerate(gpu.log) if name == "side" and "aten" in event)


def test_a_block_may_be_rewritten_as_soon_as_the_step_is_over(half: ConnectorWorker, gpu: Gpu) -> None:
    source = _fill(half, (0, 1, 2), END, seed=3)
    with gpu:
        _harvest(half, 7, (0, 1, 2), START, END)
        assert half.take_report() is None, "the copy is not over"
        _fill(half, (0, 1, 2), END, seed=4)
    rewritten = max(index for index, (_, _, what) in enumerate(gpu.log) if what in caches(half))
    assert gpu.log[rewritten][0] == "main" and rewritten > gpu.log.index(("side", "done", None))
    gpu.done = True
    report = half.take_report()
    assert report is not None and report.stored == {7: 1}
    assert gpu.log[-1] == ("host", "waits", "side"), "nobody looks at it before it is there"
    assert torch.equal(half.store.get(7).values, source.values[:, :, START:END])
    assert torch.allclose(half.store.get(7).keys, source.keys[:, :, START:END], atol=1e-5)
