"""Probing: packings of all kinds are found out and used; what does not keep a block's numbers in place is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_integrations.connector.worker.boxes import split
from kvcomm_integrations.connector.worker.cache_layout import EngineWrite, Layout, Packing, block_shapes, probe_layout
from kvcomm_integrations.connector.worker.paged_cache import PagedCache
from kvcomm_integrations.errors import UnsupportedModelError
from kvcomm_integrations.reuse.kv import KV

LAYERS, BLOCKS = 3, 6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(128, 64, 3), (32, 128, 1), (32, 96, 2), (16, 64, 3)]
"""Block size, head dimension, KV heads."""


@dataclass
class Engine:
    """Caches and an operation that packs like some engine's, number by number.

    Args:
        layers: the caches.
        offsets: where in a block each number goes, ``(2, kv_heads, block, head_dim)``.
    """

    layers: list[torch.Tensor]
    offsets: torch.Tensor

    @property
    def shape(self) -> Any:
        return block_shapes(self.layers[0])[0]

    def places(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Where in the layer's memory, ``(2, tokens, kv_heads, head_dim)``."""
        size, cache = self.shape.block_size, self.layers[layer]
        block = cache.storage_offset() + slots // size * self.shape.block_stride
        return self.offsets[:, :, slots % size].transpose(1, 2) + block[:, None, None]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        storage = memory(self.layers[layer])
        for half, places in zip((keys, values), self.places(layer, slots), strict=True):
            storage[places] = half


def memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


def grid(block: int, dim: int, heads: int) -> list[torch.Tensor]:
    """Head, token and channel of each number, to compute with."""
    return list(torch.meshgrid(torch.arange(heads), torch.arange(block), torch.arange(dim), indexing="ij"))


def cpu(block: int, dim: int, heads: int, dtype: torch.dtype) -> Engine:
    head, token, channel = grid(block, dim, heads)
    base = head * 2 * block * dim
    keys, values = base + channel * block + token, base + block * dim + token * dim + channel
    return Engine(head_major(block, dim, heads, dtype), torch.stack([keys, values]))


def amx(block: int, dim: int, heads: int, dtype: torch.dtype) -> Engine:
    """Keys ``[block/16, head_dim/2, 16 tokens, 2 channels]``, values ``[head_dim/16, block/2, 16 channels, 2 tokens]``.

    So the kernels for AMX tiles like bfloat16.
    """
    head, token, channel = grid(block, dim, heads)
    base = head * 2 * block * dim
    keys = base + token // 16 * 16 * dim + channel // 2 * 32 + token % 16 * 2 + channel % 2
    values = base + block * dim + channel // 16 * 16 * block + token // 2 * 32 + channel % 16 * 2 + token % 2
    return Engine(head_major(block, dim, heads, dtype), torch.stack([keys, values]))


def by_eights(block: int, dim: int, heads: int, dtype: torch.dtype) -> Engine:
    """Keys ``[head_dim/8, block, 8 channels]``, values ``[head_dim, block]``: as some GPUs' kernels like it."""
    head, token, channel = grid(block, dim, heads)
    base = head * 2 * block * dim
    keys = base + channel // 8 * 8 * block + token * 8 + channel % 8
    return Engine(
        head_major(block, dim, heads, dtype), torch.stack([keys, base + block * dim + channel * block + token])
    )


def in_pairs(block: int, dim: int, heads: int, dtype: torch.dtype) -> Engine:
    """Four channels of each token together, three levels of tiles, values before keys."""
    head, token, channel = grid(block, dim, heads)
    tile = token // 8 * 8 * dim + token // 2 % 4 * 2 * dim
    keys = head * 2 * block * dim + block * dim + tile + channel // 4 * 8 + token % 2 * 4 + channel % 4
    return Engine(head_major(block, dim, heads, dtype), torch.stack([keys, keys - block * dim]))


def swizzled(block: int, dim: int, heads: int, dtype: torch.dtype) -> Engine:
    """Channels turned by the token's number, as against bank conflicts: no strided view."""
    head, token, channel = grid(block, dim, heads)
    keys = head * 2 * block * dim + token * dim + (channel ^ token % 8)
    return Engine(head_major(block, dim, heads, dtype), torch.stack([keys, keys + block * dim]))


def shuffled(block: int, dim: int, heads: int, dtype: torch.dtype) -> Engine:
    """Anywhere in the block."""
    order = torch.randperm(2 * heads * block * dim, generator=torch.Generator().manual_seed(3))
    return Engine(head_major(block, dim, heads, dtype), order.view(2, heads, block, dim))


def gpu_heads_first(block: int, dim: int, heads: int, dtype: torch.dtype) -> Engine:
    head, token, channel = grid(block, dim, heads)
    keys = (head * block + token) * 2 * dim + channel
    return Engine(head_major(block, dim, heads, dtype), torch.stack([keys, keys + dim]))


def gpu_tokens_first(block: int, dim: int, heads: int, dtype: torch.dtype) -> Engine:
    """The same view of memory in which a token's heads lie together."""
    layers = torch.zeros(LAYERS, BLOCKS, block, heads, 2 * dim, dtype=dtype).transpose(2, 3).unbind(0)
    head, token, channel = grid(block, dim, heads)
    keys = (token * heads + head) * 2 * dim + channel
    return Engine(list(layers), torch.stack([keys, keys + dim]))


def gpu_blocks_first(block: int, dim: int, heads: int, dtype: torch.dtype) -> Engine:
    """All layers of a block lie together."""
    engine = gpu_heads_first(block, dim, heads, dtype)
    layers = torch.zeros(BLOCKS, LAYERS, heads, block, 2 * dim, dtype=dtype).unbind(1)
    return Engine(list(layers), engine.offsets)


def halves_inside(block: int, dim: int, heads: int, dtype: torch.dtype) -> Engine:
    """``(blocks, 2, block, kv_heads, head_dim)``."""
    head, token, channel = grid(block, dim, heads)
    layers = [torch.zeros(BLOCKS, 2, block, heads, dim, dtype=dtype) for _ in range(LAYERS)]
    keys = (token * heads + head) * dim + channel
    return Engine(layers, torch.stack([keys, keys + block * heads * dim]))


def halves_inside_heads_first(block: int, dim: int, heads: int, dtype: torch.dtype) -> Engine:
    """The same, a head's tokens together in memory."""
    head, token, channel = grid(block, dim, heads)
    layers = [torch.zeros(BLOCKS, 2, heads, block, dim, dtype=dtype).transpose(2, 3) for _ in range(LAYERS)]
    keys = (head * block + token) * dim + channel
    return Engine(layers, torch.stack([keys, keys + block * heads * dim]))


def halves_outside(block: int, dim: int, heads: int, dtype: torch.dtype) -> Engine:
    """``(2, blocks, block, kv_heads, head_dim)``."""
    head, token, channel = grid(block, dim, heads)
    layers = [torch.zeros(2, BLOCKS, block, heads, dim, dtype=dtype) for _ in range(LAYERS)]
    keys = (token * heads + head) * dim + channel
    return Engine(layers, torch.stack([keys, keys + BLOCKS * block * heads * dim]))


def head_major(block: int, dim: int, heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """All layers one after another in one piece of memory, as vLLM makes them."""
    return list(torch.zeros(LAYERS, BLOCKS, heads, block, 2 * dim, dtype=dtype).unbind(0))


Make = Callable[[int, int, int, torch.dtype], Engine]
PACKINGS: list[Make] = [
    cpu, amx, by_eights, in_pairs, swizzled, shuffled, gpu_heads_first, gpu_tokens_first, gpu_blocks_first,
    halves_inside, halves_inside_heads_first, halves_outside,
]  # fmt: skip
NAMED = {
    "cpu": Layout.CPU,
    "gpu_heads_first": Layout.GPU,
    "gpu_tokens_first": Layout.GPU,
    "gpu_blocks_first": Layout.GPU,
}
SCATTERED = (swizzled, shuffled)


def probed(engine: Engine) -> Layout | Packing:
    return probe_layout(engine.layers, engine.write)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("make", PACKINGS)
def test_the_probe_finds_every_number(make: Make, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    engine = make(*size, dtype)
    found = probed(engine)
    assert not any(layer.any() for layer in engine.layers)  # nothing is left behind
    if make.__name__ in NAMED:
        assert found is NAMED[make.__name__]
    else:
        assert isinstance(found, Packing)
        assert torch.equal(found.offsets, engine.offsets)
        assert (found.halves is None) == (make in SCATTERED)
    cache = PagedCache(engine.layers, found)
    assert (cache.block_size, cache.head_dim, cache.kv_heads) == size
    assert cache.num_blocks == BLOCKS
    _check_span(engine, cache, [4, 1, 2, 3, 0, 5], 3, 3 + size[0] + 5)


def _check_span(engine: Engine, cache: PagedCache, blocks: list[int], start: int, end: int) -> None:
    """What is written is where the engine puts it, nothing else has changed, and reads give it back."""
    generator = torch.Generator().manual_seed(start * 1000 + end)
    size = (LAYERS, cache.kv_heads, end - start, cache.head_dim)
    noise = [torch.randn(layer.shape, generator=generator).to(cache.dtype) for layer in engine.layers]
    for layer, numbers in zip(engine.layers, noise, strict=True):
        layer.copy_(numbers)
    whole = [memory(layer).clone() for layer in engine.layers]
    keys, values = (torch.randn(size, generator=generator).to(cache.dtype) for _ in range(2))
    slots = cache.slots(blocks, torch.arange(start, end))
    for layer in range(LAYERS):
        engine.write(layer, keys[layer].transpose(0, 1), values[layer].transpose(0, 1), slots)
    expected = [memory(layer).clone() for layer in engine.layers]
    back = cache.read(blocks, start, end)
    assert torch.equal(back.keys, keys) and torch.equal(back.values, values)
    assert back.keys.is_contiguous() and back.values.is_contiguous()
    stored = cache.read(blocks, start, end, as_stored=True)
    assert torch.equal(stored.keys, keys) and torch.equal(stored.values, values)
    assert stored.keys.is_contiguous() or cache.keys_by_channel
    by_channel = keys.transpose(2, 3).contiguous().transpose(2, 3)
    padded = torch.cat([keys.new_zeros(*size[:2], 1, size[3]), keys], dim=2)[:, :, 1:]
    for given_keys in (keys, by_channel, padded, by_channel.float()):
        for layer, before in zip(engine.layers, whole, strict=True):
            memory(layer).copy_(before)
        given_values = values.to(given_keys.dtype)
        cache.write(blocks, start, KV(given_keys[:1], given_values[:1]))
        cache.write(blocks, start, KV(given_keys[1:], given_values[1:]), first_layer=1)
        assert all(torch.equal(memory(layer), after) for layer, after in zip(engine.layers, expected, strict=True))
    part = cache.read(blocks, start, end, slice(1, 3))
    assert torch.equal(part.keys, keys[1:]) and torch.equal(part.values, values[1:])


@settings(max_examples=60, deadline=None)
@given(
    make=st.sampled_from(PACKINGS),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([(32, 32, 2), (16, 32, 1)]),
    blocks=st.one_of(st.just(list(range(BLOCKS))), st.permutations(range(BLOCKS))),
    share=st.tuples(st.integers(0, 96), st.integers(0, 96)).map(sorted),
)
def test_any_span_is_written_and_read_and_no_other_token(
    make: Make, dtype: torch.dtype, size: tuple[int, int, int], blocks: list[int], share: list[int]
) -> None:
    engine = make(*size, dtype)
    _check_span(engine, PagedCache(engine.layers, probed(engine)), blocks, *share)


@pytest.mark.parametrize("make", [cpu, amx, shuffled])
def test_layers_in_memories_of_their_own(make: Make) -> None:
    engine = make(32, 64, 3, torch.bfloat16)
    engine.layers = [torch.zeros_like(layer) for layer in engine.layers]
    _check_span(engine, PagedCache(engine.layers, probed(engine)), [4, 1, 2, 3, 0, 5], 13, 127)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_cache_that_begins_anywhere_in_its_memory(place: int) -> None:
    """Neighbours cannot be copied as one number where they are not aligned."""
    engine = amx(32, 64, 1, torch.bfloat16)
    size = engine.layers[0].numel()
    whole = torch.zeros(LAYERS * (size + 2) + place, dtype=torch.bfloat16)
    starts = [place + layer * (size + 2) for layer in range(LAYERS)]
    engine.layers = [whole[start : start + size].view(engine.layers[0].shape) for start in starts]
    _check_span(engine, PagedCache(engine.layers, probed(engine)), [4, 1, 2, 3, 0, 5], 13, 127)


def test_tiles_are_told_in_words() -> None:
    tiled = "keys 8x16 tokens of 32x2 channels, values 64x2 tokens of 4x16 channels"
    assert probed(amx(128, 64, 3, torch.bfloat16)).value == tiled
    assert probed(shuffled(32, 64, 3, torch.bfloat16)).value == "scattered"


@pytest.mark.parametrize("make", PACKINGS)
def test_only_keys_stored_by_channel_are_read_so(make: Make) -> None:
    engine = make(32, 64, 2, torch.float32)
    assert PagedCache(engine.layers, probed(engine)).keys_by_channel == (make is cpu)


def test_two_blocks_of_two_halves_are_told_apart_by_probing() -> None:
    for make in (halves_inside, halves_outside):
        engine = make(16, 32, 2, torch.float32)
        ends = slice(None, 2)
        engine.layers = [
            layer[ends].clone() if make is halves_inside else layer[:, ends].clone() for layer in engine.layers
        ]
        keys = engine.offsets[0]
        dim = 0 if make is halves_inside else 1
        engine.offsets = torch.stack([keys, keys + engine.layers[0].stride(1 - dim)])
        shape = next(shape for shape in block_shapes(engine.layers[0]) if shape.block_dim == dim)

        def write(index: int, keys: Any, values: Any, slots: Any, engine: Any = engine, shape: Any = shape) -> None:
            storage = memory(engine.layers[index])
            block = slots // 16 * shape.block_stride
            for half, offsets in zip((keys, values), engine.offsets, strict=True):
                storage[offsets[:, slots % 16].transpose(0, 1) + block[:, None, None]] = half

        found = probe_layout(engine.layers, write)
        assert isinstance(found, Packing) and found.shape.block_dim == dim


# ---- what is refused -----------------------------------------------------------------------------------------------


def rounded(engine: Engine) -> EngineWrite:
    """As a quantised cache does."""
    return lambda index, keys, values, slots: engine.write(index, (keys / 16).round() * 16, values, slots)


def depends_on_block(engine: Engine) -> EngineWrite:
    turned = Engine(engine.layers, engine.offsets.flip(0))
    size = engine.shape.block_size

    def write(index: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        of = turned if int(slots[0]) // size == BLOCKS - 1 else engine
        of.write(index, keys, values, slots)

    return write


def depends_on_layer(engine: Engine) -> EngineWrite:
    turned = Engine(engine.layers, engine.offsets.flip(0))
    return lambda index, *kv: (turned if index else engine).write(index, *kv)


def only_whole_blocks(engine: Engine) -> EngineWrite:
    """Packs a block's tokens by their order in the call, so that a token alone comes first."""
    size = engine.shape.block_size

    def write(index: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        engine.write(index, keys, values, slots // size * size + torch.arange(len(slots)))

    return write


def disturbs_neighbour(after: bool) -> Callable[[Engine], EngineWrite]:
    """A token that is written spoils the one next to it."""

    def packing(engine: Engine) -> EngineWrite:
        size = engine.shape.block_size

        def write(index: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
            beside = slots + (1 if after else -1)
            beside = beside[beside // size == slots[0] // size]
            engine.write(index, keys[:1].expand(len(beside), -1, -1) * 0, values[: len(beside)], beside)
            engine.write(index, keys, values, slots)

        return write

    return packing


def beyond_the_block(engine: Engine) -> EngineWrite:
    return lambda index, keys, values, slots: engine.write(index, keys, values, slots - engine.shape.block_size)


def twice_the_same(engine: Engine) -> EngineWrite:
    return lambda index, keys, values, slots: engine.write(index, keys, keys, slots)


@pytest.mark.parametrize(
    "packing",
    [
        rounded, depends_on_block, depends_on_layer, only_whole_blocks, disturbs_neighbour(True),
        disturbs_neighbour(False), beyond_the_block, twice_the_same,
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", [cpu, amx, halves_inside])
def test_what_is_not_kept_in_place_is_refused(make: Make, packing: Callable[[Engine], EngineWrite]) -> None:
    engine = make(32, 64, 2, torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="packed in an unknown way"):
        probe_layout(engine.layers, packing(engine))


def test_a_quantised_cache_is_refused_without_a_trial() -> None:
    layers = [torch.zeros(BLOCKS, 2, 32, 128, dtype=torch.uint8)]
    with pytest.raises(UnsupportedModelError, match=r"dtype torch\.uint8"):
        probe_layout(layers, lambda *args: pytest.fail("nothing may be written"))


def test_layers_that_differ_are_refused_without_a_trial() -> None:
    layers = [torch.zeros(BLOCKS, heads, 32, 128) for heads in (2, 4)]
    with pytest.raises(UnsupportedModelError, match="differ in shape"):
        probe_layout(layers, lambda *args: pytest.fail("nothing may be written"))


# ---- cutting into boxes --------------------------------------------------------------------------------------------


@given(st.tuples(st.integers(0, 200), st.integers(0, 200)).map(sorted), st.lists(st.integers(1, 5), max_size=3))
def test_boxes_are_all_numbers_of_a_range_in_order(span: list[int], sizes: list[int]) -> None:
    numbers: list[int] = []
    boxes = list(split(*span, sizes))
    for box in boxes:
        found = [0]
        for (low, high), size in zip(box, [1, *sizes], strict=True):
            found = [number * size + digit for number in found for digit in range(low, high)]
        numbers += found
    assert numbers == list(range(*span))
    assert len(boxes) <= 2 * len(sizes) + 1


# ---- vLLM's own operation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(128, 64, 3), (32, 128, 1), (64, 80, 2)], ids=str)
def test_the_operation_of_vllm_on_this_cpu(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    ops = pytest.importorskip("vllm._custom_ops")
    backend = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vLLM has no operation for CPUs")
    block, dim, heads = size
    isa = backend._get_attn_isa(dtype, block, dim)
    layers = head_major(block, dim, heads, dtype)

    def write(index: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        halves = layers[index].view(BLOCKS, heads, 2 * block, dim).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa)

    found = probe_layout(layers, write)
    if isa == "amx":
        assert isinstance(found, Packing)
        assert torch.equal(found.offsets, amx(block, dim, heads, dtype).offsets)
    elif isa in ("vec", "vec16"):
        assert found is Layout.CPU
    assert isinstance(found, Layout) or found.halves is not None
    cache, blocks = PagedCache(layers, found), [4, 1, 2, 3]
    keys, values = (torch.randn(block + 20, heads, dim).to(dtype) for _ in range(2))
    slots = cache.slots(blocks, torch.arange(7, block + 27))
    write(1, keys, values, slots)
    back = cache.read(blocks, 7, block + 27)
    assert torch.equal(back.keys[1].transpose(0, 1), keys) and torch.equal(back.values[1].transpose(0, 1), values)
    written = layers[1].clone()
    layers[1].zero_()
    cache.write(blocks, 7, KV(back.keys[1:2], back.values[1:2]), first_layer=1)
    assert torch.equal(layers[1], written)
