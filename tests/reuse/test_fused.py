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
from tests.interpreted import DEVICES, needs_triton, not_interpreted, run_interpreted

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
        self.layers = [torch.zeros(12, HEADS, BLOCK, 2 * dim, dtype=dtype, device=device) for _ in range(LAYERS)]

    def expected(self) -> list[torch.Tensor]:
        """The caches as the plain path leaves them."""
        device = self.reference.keys.device
        layers = [torch.zeros_like(layer) for layer in self.layers]
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
        cache = fused.FusedCache(self.layers, self.rope)
        assert cache.takes(self.reference, self.correction)
        slots = torch.tensor(BLOCK_TABLE)[self.places // BLOCK] * BLOCK + self.places % BLOCK
        return int(cache.write(self.reference, self.correction, self.positions(), slots.to(cache.device)))

    def check(self) -> None:
        assert self.fill() == 0
        for index, (got, wanted) in enumerate(zip(self.layers, self.expected(), strict=True)):
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
    case.layers = [layer.transpose(1, 2).contiguous().transpose(1, 2) for layer in case.layers]
    keys = case.reference.keys.transpose(2, 3).contiguous().transpose(2, 3)
    case.reference = KV(keys, case.reference.values)
    case.check()


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
    cache = fused.FusedCache(case.layers, case.rope)
    half = KV(case.reference.keys.half(), case.reference.values.half())
    assert cache.takes(case.reference, case.correction)
    assert not cache.takes(half, case.correction)
    assert not cache.takes(KV(half.keys[:2].float(), half.values[:2].float()), case.correction)
    assert not cache.takes(case.reference, Case(device, torch.float32, 32, case.rope, 4, rank=40).correction)
    none = KV(case.reference.keys[:, :, :0], case.reference.values[:, :, :0])
    where = torch.zeros(0, dtype=torch.int64, device=device)
    assert int(cache.write(none, case.correction, where, where)) == 0
    with pytest.raises(ValueError, match="differ"):
        fused.FusedCache([case.layers[0], case.layers[1].half()], case.rope)


@needs_triton
@not_interpreted
def test_the_same_in_tritons_interpreter() -> None:
    assert run_interpreted(__file__) > 10


class Launch(Case):
    """A case whose launch is written down instead of done."""

    def arguments(self, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], dict[str, Any]]:
        """What the kernel would be launched with: positional and named arguments."""
        seen: list[Any] = []
        launch: Any = SimpleNamespace(run=lambda *args, **named: seen.append((list(args), named)))
        monkeypatch.setattr(fused, "_kernel", lambda: defaultdict(lambda: launch.run))
        self.fill()
        return seen[0]


@needs_triton
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
