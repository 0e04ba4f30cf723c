"""Spans of the paged cache against a naive reference, and what the probe accepts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_integrations.connector.worker.paged_cache import Layout, PagedCache, probe_layout
from kvcomm_integrations.errors import UnsupportedModelError
from kvcomm_integrations.reuse.kv import KV

BLOCKS, HEADS, SIZE, DIM, LAYERS = 7, 2, 5, 4, 3


def fresh() -> list[torch.Tensor]:
    return [torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM) for _ in range(LAYERS)]


def naive_put(
    layer: torch.Tensor, layout: Layout, block: int, inner: int, key: torch.Tensor, value: torch.Tensor
) -> None:
    """One token of all heads, written number by number through flat memory."""
    _, heads, size, width = layer.shape
    dim = width // 2
    for head in range(heads):
        memory = layer[block, head].view(-1)
        for i in range(dim):
            if layout is Layout.GPU:
                memory[inner * width + i] = key[head, i]
                memory[inner * width + dim + i] = value[head, i]
            else:
                memory[i * size + inner] = key[head, i]
                memory[dim * size + inner * dim + i] = value[head, i]


def engine(layers: list[torch.Tensor], layout: Layout) -> Callable[..., None]:
    def write(index: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        size = layers[index].shape[2]
        for token, slot in enumerate(slots.tolist()):
            naive_put(layers[index], layout, slot // size, slot % size, keys[token], values[token])

    return write


def random_kv(tokens: int, seed: int = 0) -> KV:
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, HEADS, tokens, DIM)
    return KV(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))


@settings(max_examples=40, deadline=None)
@given(
    layout=st.sampled_from(Layout),
    blocks=st.one_of(st.just(list(range(BLOCKS))), st.permutations(range(BLOCKS))),
    span=st.tuples(st.integers(0, BLOCKS * SIZE), st.integers(0, BLOCKS * SIZE)).map(sorted),
)
def test_write_and_read_agree_with_a_naive_cache(layout: Layout, blocks: list[int], span: list[int]) -> None:
    start, end = span
    kv = random_kv(end - start)
    layers, expected = fresh(), fresh()
    cache = PagedCache(layers, layout)
    cache.write(blocks, start, KV(kv.keys[:1], kv.values[:1]))
    cache.write(blocks, start, KV(kv.keys[1:], kv.values[1:]), first_layer=1)
    for layer in range(LAYERS):
        for token in range(end - start):
            place = start + token
            naive_put(
                expected[layer],
                layout,
                blocks[place // SIZE],
                place % SIZE,
                kv.keys[layer, :, token],
                kv.values[layer, :, token],
            )
        assert torch.equal(layers[layer], expected[layer])  # nothing beside the span was touched
    back = cache.read(blocks, start, end)
    assert torch.equal(back.keys, kv.keys) and torch.equal(back.values, kv.values)
    assert back.keys.is_contiguous() and back.keys.data_ptr() != layers[0].data_ptr()
    stored = cache.read(blocks, start, end, as_stored=True)
    assert torch.equal(stored.keys, kv.keys) and torch.equal(stored.values, kv.values)
    if layout is Layout.CPU and end > start:
        assert stored.keys.transpose(2, 3).is_contiguous()


@pytest.mark.parametrize("layout", Layout)
def test_neighbouring_writes_do_not_disturb_each_other(layout: Layout) -> None:
    cache = PagedCache(fresh(), layout)
    whole = random_kv(23)
    for start, end in [(0, 4), (11, 23), (4, 11)]:
        cache.write([6, 2, 0, 5, 1], start, KV(whole.keys[:, :, start:end], whole.values[:, :, start:end]))
    assert torch.equal(cache.read([6, 2, 0, 5, 1], 0, 23).keys, whole.keys)
    assert torch.equal(cache.read([6, 2, 0, 5, 1], 0, 23).values, whole.values)


@pytest.mark.parametrize("layout", Layout)
def test_some_layers_only(layout: Layout) -> None:
    cache = PagedCache(fresh(), layout)
    kv = random_kv(12)
    cache.write([3, 1, 4], 0, kv)
    part = cache.read([3, 1, 4], 2, 9, slice(1, 2))
    assert torch.equal(part.keys, kv.keys[1:2, :, 2:9])
    assert cache.read([3, 1, 4], 5, 5).keys.shape == (LAYERS, HEADS, 0, DIM)


def test_a_span_beyond_the_block_table_is_an_error() -> None:
    with pytest.raises(IndexError):
        PagedCache(fresh(), Layout.GPU).read([1, 2], 0, 11)


def test_sizes_and_slots() -> None:
    cache = PagedCache(fresh(), Layout.CPU)
    assert cache.bytes_per_token == 2 * LAYERS * HEADS * DIM * 4
    assert cache.slots([3, 1], torch.arange(3, 8)).tolist() == [18, 19, 5, 6, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", Layout)
def test_the_probe_finds_the_layout_and_cleans_up(layout: Layout, dtype: torch.dtype) -> None:
    layers = [layer.to(dtype) for layer in fresh()]
    assert probe_layout(layers, engine(layers, layout)) is layout
    assert all(not layer.any() for layer in layers)


@pytest.mark.parametrize("shape", [(BLOCKS, 3, SIZE, HEADS, DIM), (BLOCKS, SIZE, DIM), (BLOCKS, HEADS, SIZE, 7)])
def test_the_probe_refuses_unknown_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedModelError, match="not known"):
        probe_layout([torch.zeros(shape)], lambda *args: None)


def swapped(layers: list[torch.Tensor]) -> Callable[..., None]:
    write = engine(layers, Layout.GPU)
    return lambda index, keys, values, slots: write(index, values, keys, slots)


def nothing(layers: list[torch.Tensor]) -> Callable[..., None]:
    return lambda *args: None


def mixed(layers: list[torch.Tensor]) -> Callable[..., None]:
    gpu, cpu = engine(layers, Layout.GPU), engine(layers, Layout.CPU)
    return lambda index, *args: (gpu if index == 0 else cpu)(index, *args)


def test_values_may_come_before_keys() -> None:
    layers = fresh()
    cache, kv = PagedCache(layers, probe_layout(layers, swapped(layers))), random_kv(12)
    cache.write([3, 1, 4], 2, kv)
    other = PagedCache(layers, Layout.GPU).read([3, 1, 4], 2, 14)
    assert torch.equal(other.keys, kv.values) and torch.equal(other.values, kv.keys)


@pytest.mark.parametrize("packing", [nothing, mixed])
def test_the_probe_refuses_unknown_packings(packing: Callable[..., Callable[..., None]]) -> None:
    layers = fresh()
    with pytest.raises(UnsupportedModelError, match="packed in an unknown way"):
        probe_layout(layers, packing(layers))
    assert all(not layer.any() for layer in layers)
