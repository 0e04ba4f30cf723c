"""References that arrive later than their harvest: nothing is promised before they are there."""

from __future__ import annotations

import pytest
import torch

from kvcomm_integrations.connector.metadata import StepMetadata, WorkerReport
from kvcomm_integrations.connector.worker.transfer import PATIENCE, Arrivals
from kvcomm_integrations.connector.worker.worker import ConnectorWorker
from kvcomm_integrations.planning.reference_index import ACKNOWLEDGE_STEPS
from kvcomm_integrations.reuse.kv import KV, is_finite
from kvcomm_integrations.reuse.transfers import ToHost, to_device
from tests.connector.test_worker import _fill, _harvest, _worker


class Late:
    """KV that arrives when the test says so."""

    def __init__(self, kv: KV) -> None:
        self.kv, self.here, self.waited = kv, False, False

    def there(self) -> bool:
        return self.here

    def wait(self) -> tuple[KV, bool]:
        self.waited = True
        return self.kv, is_finite(self.kv)


@pytest.fixture
def sent() -> list[Late]:
    """What has been sent on its way."""
    return []


@pytest.fixture
def half(sent: list[Late]) -> ConnectorWorker:
    half = _worker()
    half._vllm_config.parallel_config.rank = 0

    def send(kv: KV) -> Late:
        sent.append(Late(kv))
        return sent[-1]

    half._arrivals = Arrivals(send)
    _fill(half, (0, 1, 2), 40, seed=3)
    return half


def report_of(half: ConnectorWorker) -> WorkerReport:
    return half.take_report() or WorkerReport()


def test_a_reference_counts_once_it_is_there(half: ConnectorWorker, sent: list[Late]) -> None:
    _harvest(half, 7, (0, 1, 2), 0, 40)
    _harvest(half, 8, (0, 1, 2), 20, 40)
    half.take_stats()
    assert report_of(half).stored == {} and len(half.store) == 0
    sent[1].here = True
    assert report_of(half).stored == {8: 1}
    assert list(half.store) == [8] and half.take_stats() is not None
    sent[0].here = True
    assert report_of(half).stored == {7: 1}
    assert report_of(half).stored == {}


def test_what_the_engine_writes_meanwhile_does_not_matter(half: ConnectorWorker, sent: list[Late]) -> None:
    """vLLM may give the blocks to somebody else as soon as the step is over."""
    source = _fill(half, (0, 1, 2), 40, seed=4)
    _harvest(half, 7, (0, 1, 2), 0, 40)
    _fill(half, (0, 1, 2), 40, seed=5)
    sent[0].here = True
    assert report_of(half).stored == {7: 1}
    assert torch.equal(half.store.get(7).values, source.values)


def test_one_that_is_late_is_waited_for_before_it_would_be_taken_for_lost(
    half: ConnectorWorker, sent: list[Late]
) -> None:
    _harvest(half, 7, (0, 1, 2), 0, 40)
    for _ in range(PATIENCE):
        assert report_of(half).stored == {}
    assert not sent[0].waited
    assert report_of(half).stored == {7: 1}
    assert sent[0].waited and PATIENCE < ACKNOWLEDGE_STEPS


def test_one_that_is_no_number_is_reported(half: ConnectorWorker, sent: list[Late]) -> None:
    _harvest(half, 7, (0, 1, 2), 0, 40)
    sent[0].kv.values[0, 0, 0, 0] = torch.nan
    sent[0].here = True
    report = report_of(half)
    assert report.stored == {} and "NaN or infinity" in report.failed[7]
    assert len(half.store) == 0 and half._arrivals is not None and len(half._arrivals) == 0


@pytest.mark.parametrize("why", ["dropped", "weights", "disabled"])
def test_one_that_nobody_wants_any_more_is_not_stored(half: ConnectorWorker, sent: list[Late], why: str) -> None:
    _harvest(half, 7, (0, 1, 2), 0, 40)
    if why == "dropped":
        half.save(StepMetadata(drops=[7, 9]))
    elif why == "weights":
        half.weights_changed(named=False)
    else:
        half.disable("a test says so")
    sent[0].here = True
    assert report_of(half).stored == {} and len(half.store) == 0


def test_on_a_cpu_everything_is_there_at_once() -> None:
    assert Arrivals.of(torch.device("cpu"), keep=False) is None
    numbers = torch.arange(3)
    assert to_device(numbers, torch.device("cpu")) is numbers


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [False, True])
def test_a_copy_from_a_gpu(keep: bool) -> None:
    device = torch.device("cuda")
    assert torch.equal(to_device(torch.arange(9), device).cpu(), torch.arange(9))
    big = torch.randn(2048, 2048, device=device)
    for _ in range(20):  # keeps the stream busy that the copy has to wait for
        big = big @ big / big.norm()
    kv = KV(big.view(4, 4, -1, 64) * 1, big.view(4, 4, -1, 64) + 1)
    arriving = ToHost(kv, torch.cuda.Stream(device), keep=keep)
    got, finite = arriving.wait()
    assert finite and arriving.there()
    assert all(part.is_cuda is keep and part.is_pinned() is not keep for part in got)
    assert torch.equal(got.keys.cpu(), kv.keys.cpu()) and torch.equal(got.values.cpu(), kv.values.cpu())
    kv.values[0, 0, 0, 0] = torch.inf
    assert not ToHost(kv, torch.cuda.Stream(device), keep=keep).wait()[1]
