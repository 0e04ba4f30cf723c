"""The fused kernel writes what the plain path writes, on a GPU and in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcomm_integrations.reuse import fused
from kvcomm_integrations.reuse.affine import Correction
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.policies.ridge import Ridge
from kvcomm_integrations.reuse.rope import Rope
from kvcomm_integrations.reuse.scratch import Scratch
from tests.interpreted import DEVICES, IMPORTABLE, importable_triton, needs_triton, not_interpreted, run_with_triton

from .shapes import EDGE, drifted, random_kv

LAYERS, HEADS, BLOCK = 3, 2, 8
BLOCK_TABLE = [5, 2, 9, 0, 7, 3, 11]
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest difference to the plain path, relative to the largest number."""


class Case:
    """A content of an edge that has learned, and the caches of all layers."""

    def __init__(self, device: str, dtype: torch.dtype, dim: int, rope: Rope, tokens: int, rank: int = 32) -> None:
        torch.manual_seed(tokens)
        self.rope, self.start = rope, 3
        ridge = Ridge(rank=rank, penalty=1.0)
        for length in (40, 50):
            example = random_kv(length, LAYERS, HEADS, dim)
            ridge.observe(EDGE, *(KV(*(x.to(device) for x in kv)) for kv in (example, drifted(example))))
        whole = random_kv(tokens + 9, LAYERS, HEADS, dim)
        whole = KV(*(part.to(device, dtype) for part in whole))
        self.reference = KV(whole.keys[:, :, 4 : 4 + tokens], whole.values[:, :, 4 : 4 + tokens])
        correction = ridge.correction(EDGE, self.reference, 4, leverage=1.6)
        assert correction is not None
        assert correction.trust == 0.5
        self.correction: Correction = correction
        self.places = torch.arange(self.start, self.start + tokens)
        self.caches = [torch.zeros(12, HEADS, BLOCK, 2 * dim, dtype=dtype, device=device) for _ in range(LAYERS)]
        self.form: fused.BlockForm | None = None

    def expected(self) -> list[torch.Tensor]:
        """The caches as the plain path leaves them."""
        device = self.reference.keys.device
        layers = [torch.zeros_like(layer) for layer in self.seen()]
        blocks = torch.tensor(BLOCK_TABLE)[self.places // BLOCK].to(device)
        inner = (self.places % BLOCK).to(device)
        scratch = Scratch(device)
        for part, kv in self.correction.estimates(self.reference, scratch):
            self.rope.rotate_rows(kv.keys.transpose(2, 3), self.positions(), scratch)
            for index, rows in zip(range(part.start, part.stop), torch.cat(kv, dim=-1), strict=True):
                layers[index][blocks, :, inner] = rows.transpose(0, 1).to(layers[index].dtype)
        return layers

    def positions(self) -> torch.Tensor:
        return (self.places + 700).to(self.reference.keys.device)

    def fill(self) -> int:
        """Run the kernel; returns how many numbers are not finite."""
        cache = fused.FusedCache(self.caches, self.rope, self.form)
        assert cache.takes(self.reference, self.correction)
        slots = torch.tensor(BLOCK_TABLE)[self.places // BLOCK] * BLOCK + self.places % BLOCK
        return int(cache.write(self.reference, self.correction, self.positions(), slots.to(cache.device)))

    def seen(self) -> list[torch.Tensor]:
        """What is in the caches, ``(blocks, kv_heads, block, 2 * dim)``."""
        if self.caches[0].dim() == 4:
            return self.caches
        halves = self.caches[0].shape[:2].index(2)
        return [torch.cat(cache.unbind(halves), dim=-1).transpose(1, 2) for cache in self.caches]

    def check(self) -> None:
        assert self.fill() == 0
        for index, (got, wanted) in enumerate(zip(self.seen(), self.expected(), strict=True)):
            wanted = wanted.float()
            assert float((got.float() - wanted).abs().max()) <= ROUNDING[got.dtype] * float(wanted.abs().max()), index
            assert torch.equal(got != 0, wanted != 0), f"layer {index}: tokens beside the content were touched"


def rope_of(rotary: int, interleaved: bool = False, dtype: torch.dtype = torch.float32) -> Rope:
    return Rope(1e4 ** (-torch.arange(0, rotary, 2) / rotary), interleaved, scale=1.1, table_dtype=dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_the_kernel_writes_what_the_plain_path_writes(device: str, dtype: torch.dtype, interleaved: bool) -> None:
    """More tokens than one program takes, from the middle of a block on, over blocks in no order."""
    Case(device, dtype, 64, rope_of(64, interleaved, dtype), tokens=43).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dim", "rotary", "interleaved", "tokens", "rank"),
    [
        (64, 16, False, 20, 32),  # a part of the channels is rotated
        (64, 32, True, 20, 32),
        (80, 80, False, 5, 7),  # no powers of two
        (80, 20, True, 5, 32),
        (128, 128, False, 32, 32),
        (16, 16, False, 1, 1),
    ],
)
def test_shapes(device: str, dim: int, rotary: int, interleaved: bool, tokens: int, rank: int) -> None:
    Case(device, torch.float32, dim, rope_of(rotary, interleaved), tokens, rank).check()


@pytest.mark.parametrize("device", DEVICES)
def test_a_reference_and_caches_in_another_order_in_memory(device: str) -> None:
    case = Case(device, torch.float32, 32, rope_of(32), tokens=18)
    case.caches = [layer.transpose(1, 2).contiguous().transpose(1, 2) for layer in case.caches]
    keys = case.reference.keys.transpose(2, 3).contiguous().transpose(2, 3)
    case.reference = KV(keys, case.reference.values)
    case.check()


VLLM_ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""Orders in memory of layers, blocks, heads, tokens (N) and channels that vLLM's runners make caches in."""
HALVES = {
    "halves of a block, NHD": ((12, 2, BLOCK, HEADS), (0, 1, 2, 3)),
    "halves of a block, HND": ((12, 2, HEADS, BLOCK), (0, 1, 3, 2)),
    "halves of the cache, NHD": ((2, 12, BLOCK, HEADS), (0, 1, 2, 3)),
    "halves of the cache, HND": ((2, 12, HEADS, BLOCK), (0, 1, 3, 2)),
}
"""Caches with keys and values apart, as FlashInfer's and FlashAttention's were: memory, and how it is shown."""
ARRANGEMENTS = [*VLLM_ORDERS, *HALVES]


def arrange(case: Case, arrangement: str) -> None:
    """Give a case caches of another arrangement."""
    first = case.caches[0]
    if arrangement in VLLM_ORDERS:
        order = VLLM_ORDERS[arrangement]
        sizes = (LAYERS, *first.shape)
        whole = first.new_zeros([sizes[dim] for dim in order])
        case.caches = list(whole.permute([order.index(dim) for dim in range(5)]).unbind(0))
        return
    sizes, shown = HALVES[arrangement]
    dim = first.shape[-1] // 2
    case.caches = [first.new_zeros(*sizes, dim).permute(*shown, 4) for _ in range(LAYERS)]
    strides = case.caches[0].stride()
    halves = sizes[:2].index(2)
    keys = fused.Half(0, strides[3], strides[2], strides[4])
    values = keys._replace(base=strides[halves])
    case.form = fused.BlockForm(HEADS, BLOCK, dim, strides[1 - halves], keys, values)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_caches_as_vllm_arranges_them(device: str, arrangement: str, dtype: torch.dtype) -> None:
    case = Case(device, dtype, 32, rope_of(32, dtype=dtype), tokens=18)
    arrange(case, arrangement)
    case.check()


@not_interpreted
def test_all_orders_of_this_vllm_are_tested() -> None:
    layouts = pytest.importorskip("vllm.v1.kv_cache_layout").KVCacheLayout
    assert {layout.name: layout.value for layout in layouts} == VLLM_ORDERS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_numbers_that_are_not_finite_are_counted(device: str, dtype: torch.dtype) -> None:
    case = Case(device, dtype, 32, rope_of(32), tokens=18)
    case.reference.values[0, 1, 7, 3] = torch.inf
    assert case.fill() == 2 * 32, "a token's hidden channels reach all of its head"
    case.reference.keys[2, 0, 17, 3] = torch.nan
    assert case.fill() == 2 * 2 * 32
    if dtype is torch.float16:
        case = Case(device, dtype, 32, rope_of(32), tokens=18)
        case.correction.map.up_values[0, -1, 5] = 1e5
        assert case.fill() == 18, "finite, but not in the cache's type"


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_kernel_cannot_take(device: str) -> None:
    case = Case(device, torch.float32, 32, rope_of(32), tokens=4)
    cache = fused.FusedCache(case.caches, case.rope)
    half = KV(case.reference.keys.half(), case.reference.values.half())
    assert cache.takes(case.reference, case.correction)
    assert not cache.takes(half, case.correction)
    assert not cache.takes(KV(half.keys[:2].float(), half.values[:2].float()), case.correction)
    assert not cache.takes(case.reference, Case(device, torch.float32, 32, case.rope, 4, rank=40).correction)
    none = KV(case.reference.keys[:, :, :0], case.reference.values[:, :, :0])
    where = torch.zeros(0, dtype=torch.int64, device=device)
    assert int(cache.write(none, case.correction, where, where)) == 0
    with pytest.raises(ValueError, match="differ"):
        fused.FusedCache([case.caches[0], case.caches[1].half()], case.rope)


@needs_triton
@not_interpreted
def test_the_same_in_tritons_interpreter() -> None:
    assert run_with_triton(__file__) == 16 + len(ARRANGEMENTS) * len(ROUNDING)


@needs_triton
@not_interpreted
@pytest.mark.skipif(IMPORTABLE, reason="they run in this process")
def test_the_kernel_compiles_where_triton_can_be_imported() -> None:
    assert run_with_triton(__file__, "compiles_for_gpus", interpreted=False) == 6


class Launch(Case):
    """A case whose launch is written down instead of done."""

    def arguments(self, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], dict[str, Any]]:
        """What the kernel would be launched with: positional and named arguments."""
        seen: list[Any] = []
        launch: Any = SimpleNamespace(run=lambda *args, **named: seen.append((list(args), named)))
        monkeypatch.setattr(fused, "_kernel", lambda: defaultdict(lambda: launch.run))
        self.fill()
        return seen[0]


@importable_triton
@not_interpreted
@pytest.mark.parametrize(("dtype", "rotary"), [(torch.bfloat16, 128), (torch.float16, 32), (torch.float32, 64)])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles_for_gpus(
    capability: int, dtype: torch.dtype, rotary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling needs no GPU; it also tells whether a program's share fits into what a GPU has for it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvcomm_integrations.reuse.fused_kernel import place_corrected

    args, named = Launch("cpu", dtype, 128, rope_of(rotary), tokens=20).arguments(monkeypatch)
    names = {torch.int64: "*i64", torch.int32: "*i32", torch.float32: "*fp32"}
    names |= {torch.bfloat16: "*bf16", torch.float16: "*fp16"}
    kinds = [names[x.dtype] if torch.is_tensor(x) else {int: "i32", float: "fp32"}[type(x)] for x in args]
    signature = dict(zip(place_corrected.arg_names, kinds + ["constexpr"] * len(named), strict=True))
    places = {name: (place,) for place, name in enumerate(place_corrected.arg_names)}
    source = ASTSource(place_corrected, signature, {places[name]: value for name, value in named.items()})
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert built.metadata.shared <= 48 << 10
    assert b"ELF" in built.asm["cubin"][:8]


@not_interpreted
def test_without_a_gpu_the_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fused.available(torch.device("cpu"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not fused.available(torch.device("cuda"))
