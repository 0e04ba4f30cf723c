"""Loads by the fused kernel: what a worker writes with it, and what becomes of a kernel that cannot be trusted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcomm_integrations.connector.metadata import StepMetadata
from kvcomm_integrations.connector.worker.fault_injection import SWITCH
from kvcomm_integrations.connector.worker.paged_cache import Layout, PagedCache
from kvcomm_integrations.connector.worker.transfer import FusedLoads, block_form
from kvcomm_integrations.connector.worker.worker import ConnectorWorker
from kvcomm_integrations.planning.jobs import LoadJob, LoadSpan, ObserveJob
from kvcomm_integrations.reuse.affine import Correction
from kvcomm_integrations.reuse.kv import KV
from tests.connector.test_cache_layout import PACKINGS, Make, grid, probed
from tests.connector.test_worker import BLOCK, DIM, EDGE, HEADS, LAYERS, _harvest, _worker
from tests.interpreted import DEVICES, needs_triton, not_interpreted, run_with_triton

BLOCKS, START, END = (6, 7, 9), 9, 47
SPAN = LoadSpan(2, offset=3, start=START, end=END, edge=EDGE)


def taught(device: str, dtype: torch.dtype = torch.float32, edge: bool = True) -> ConnectorWorker:
    """A worker with a GPU's layout that holds reference 2, and knows its edge if wanted."""
    half = _worker()
    assert half.rope is not None
    layers = [torch.zeros(12, HEADS, BLOCK, 2 * DIM, dtype=dtype, device=device) for _ in range(LAYERS)]
    half.use(PagedCache(layers, Layout.GPU), half.rope)
    for ref_id, seed in ((1, 5), (2, 6)):
        fill(half, (0, 1, 2), seed)
        _harvest(half, ref_id, (0, 1, 2), 0, 44)
        while half.store.snapshot()[-1].ref_id != ref_id:
            half.take_report()
        fill(half, (3, 4, 5), seed + 10)
        if edge:
            half.save(StepMetadata(observes=[ObserveJob("ridge", EDGE, ref_id, 0, (3, 4, 5), 2, 40)]))
    assert half.learner.background.wait(10)
    return half


def fill(half: ConnectorWorker, blocks: tuple[int, ...], seed: int) -> None:
    assert half.cache is not None and half.rope is not None
    generator = torch.Generator().manual_seed(seed)
    kv = KV(*(torch.randn(LAYERS, HEADS, 44, DIM, generator=generator) for _ in range(2)))
    half.cache.write(blocks, 0, KV(half.rope.rotate(kv.keys, torch.arange(44)), kv.values))


def load(half: ConnectorWorker, policy: str = "ridge", exact: bool = False) -> tuple[KV, str]:
    """What a load leaves in the cache, and its fault."""
    assert half.cache is not None
    half.cache.write(BLOCKS, 0, KV(*(torch.zeros(LAYERS, HEADS, 48, DIM) for _ in range(2))))
    span = LoadSpan(2, 3, START, END, EDGE, exact=exact)
    half.load(StepMetadata(loads=[LoadJob("r", BLOCKS, policy, (span,), (), (0,) * 38, START, END)]))
    report = half.take_report()
    assert report is not None
    return half.cache.read(BLOCKS, START, END), report.loads["r"].fault


class Kernel:
    """In place of the kernel: writes the plain estimate, spoiled if wanted, and counts its calls."""

    def __init__(self, half: ConnectorWorker, error: float = 0.0, strange: int = 0, fails: bool = False) -> None:
        assert half.cache is not None and half._mover is not None
        self.half, self.error, self.strange, self.fails = half, error, strange, fails
        self.calls = 0
        half._mover.fused = FusedLoads(half.cache, self)  # type: ignore[arg-type]

    def takes(self, reference: KV, correction: Correction) -> bool:
        return True

    def write(self, reference: KV, correction: Correction, positions: Any, slots: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.fails:
            raise RuntimeError("out of resource: shared memory")
        assert self.half.cache is not None and self.half._mover is not None
        assert torch.equal(slots, self.half.cache.slots(BLOCKS, torch.arange(START, END)))
        assert torch.equal(positions, torch.arange(START, END))
        kv = self.half._mover.estimate("ridge", SPAN)
        self.half.cache.write(BLOCKS, START, KV(kv.keys + self.error, kv.values))
        return torch.tensor([self.strange], dtype=torch.int32)


@not_interpreted
@pytest.mark.parametrize(
    ("policy", "edge", "exact", "armed"),
    [
        ("aligned", True, False, False),
        ("ridge", False, False, False),
        ("ridge", True, True, False),
        ("ridge", True, False, True),
    ],
)
def test_what_is_no_affine_map_takes_the_plain_path(
    policy: str, edge: bool, exact: bool, armed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = taught("cpu", edge=edge)
    expected, _ = load(half, policy, exact)
    kernel = Kernel(half)
    if armed:
        monkeypatch.setenv(SWITCH, "1")
        half.faults.arm("harvest", "raise")
    got, fault = load(half, policy, exact)
    assert (kernel.calls, fault) == (0, "")
    assert torch.equal(got.keys, expected.keys) and torch.equal(got.values, expected.values)


@not_interpreted
def test_a_kernel_is_compared_once_and_then_trusted() -> None:
    half = taught("cpu")
    expected, _ = load(half)
    kernel = Kernel(half)
    for calls in (1, 2):
        got, fault = load(half)
        assert (kernel.calls, fault) == (calls, "")
        assert torch.equal(got.keys, expected.keys) and torch.equal(got.values, expected.values)
    kernel.error = 0.5
    got, fault = load(half)
    assert not torch.equal(got.keys, expected.keys), "it is not compared again"
    kernel.strange = 3
    assert "NaN or infinity" in load(half)[1]


@not_interpreted
@pytest.mark.parametrize("kind", ["wrong", "not a number", "fails"])
def test_a_kernel_that_cannot_be_trusted_is_not_used_again(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    half = taught("cpu")
    expected, _ = load(half)
    kernel = Kernel(half, error={"wrong": 0.5, "not a number": torch.nan}.get(kind, 0.0), fails=kind == "fails")
    for _ in range(3):
        got, fault = load(half)
        assert (kernel.calls, fault) == (1, "")
        assert torch.equal(got.keys, expected.keys) and torch.equal(got.values, expected.values)
    assert sum("plain path" in record.message for record in caplog.records) == 1


@not_interpreted
def test_an_estimate_that_is_not_finite_is_not_held_against_a_new_kernel() -> None:
    half = taught("cpu")
    kernel = Kernel(half, strange=1)
    assert load(half)[1] == ""
    half.store.get(2).values[1, 0, 9, 0] = torch.nan
    assert "NaN or infinity" in load(half)[1]
    assert kernel.calls == 2


@not_interpreted
@pytest.mark.parametrize("make", PACKINGS)
def test_the_kernel_is_told_where_keys_and_values_are(make: Make) -> None:
    engine = make(16, 32, 2, torch.float32)
    cache = PagedCache(engine.layers, probed(engine))
    form = block_form(cache)
    assert (form is None) == (make.__name__ in ("cpu", "amx", "by_eights", "in_pairs", "swizzled", "shuffled"))
    if form is None:
        return
    assert (form.kv_heads, form.block_size, form.head_dim) == (2, 16, 32)
    assert form.block_stride == engine.shape.block_stride
    head, token, channel = grid(16, 32, 2)
    for half, offsets in zip((form.keys, form.values), engine.offsets, strict=True):
        assert torch.equal(half.base + head * half.head + token * half.token + channel * half.channel, offsets)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_worker_loads_with_the_kernel_what_it_loads_without(device: str, dtype: torch.dtype) -> None:
    half = taught(device, dtype)
    assert half._mover is not None
    fused, half._mover.fused = half._mover.fused, None
    expected, _ = load(half)
    half._mover.fused = fused
    assert fused is not None
    for _ in range(2):  # compared, then trusted
        got, fault = load(half)
        assert fault == "" and fused._trusted
        for mine, plain in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, plain, atol={torch.float32: 1e-4}.get(dtype, 3e-2), rtol=1e-2)
    half.store.get(2).values[1, 0, 9, 0] = torch.nan
    assert "NaN or infinity" in load(half)[1]
    report = half.take_report()
    assert report is None or 2 in report.failed


@needs_triton
@not_interpreted
def test_the_same_in_tritons_interpreter() -> None:
    assert run_with_triton(__file__) == 3
