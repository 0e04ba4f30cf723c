"""The Triton kernel that corrects, rotates and writes a content in one pass. Importing it needs Triton.

One program handles a tile of tokens of one head of one layer. A head's channels come in four groups, so that rotating
needs no exchange between them: the first and the second channels of the rotary pairs, the keys' other channels, and
the values.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)
"""The largest finite float32."""


@triton.jit
def place_corrected(
    keys, key_layer, key_head, key_token, key_channel,
    values, value_layer, value_head, value_token, value_channel,
    down_keys, down_values, down_position, up_keys, up_values, position, cosines, sines, slots,
    caches, cache_block,
    cache_keys, cache_key_head, cache_key_token, cache_key_channel,
    cache_values, cache_value_head, cache_value_token, cache_value_channel,
    not_finite, trust, kv_heads, tokens,
    block: tl.constexpr, dim: tl.constexpr, rank: tl.constexpr, features: tl.constexpr,
    pairs: tl.constexpr, pair_step: tl.constexpr, pair_distance: tl.constexpr,
    tokens_tile: tl.constexpr, rank_tile: tl.constexpr, pairs_tile: tl.constexpr, rest_tile: tl.constexpr,
    dim_tile: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Estimate ``[K | V] + up @ (trust * down @ [K | V | position | 1]) + mean``, rotate the keys, write both.

    Grid: ``(tiles of tokens, kv_heads, layers)``. Layer 0 is not corrected. All products add up in float32.

    Args:
        keys, values: the reference, each ``(layers, kv_heads, tokens, dim)``, with its strides in elements.
        down_keys, down_values: ``(heads, rank + 1, dim)``, contiguous like all that follow up to ``slots``; ``heads``
            are all KV heads of all layers from 1 on.
        down_position: ``(heads, rank + 1, features)``.
        up_keys: ``(heads, dim, rank + 1)``; its last column is the mean correction.
        up_values: ``(heads, rank + 1, dim)``; its last row is the mean correction.
        position: ``(features, tokens)``.
        cosines, sines: ``(tokens, pairs)``.
        slots: ``(tokens,)`` int64, block number times ``block`` plus offset.
        caches: ``(layers,)`` int64, addresses of the layers' caches.
        cache_block: elements of a cache from one block to the next.
        cache_keys, cache_values: element of a block that its keys and its values begin at; their strides follow.
        not_finite: ``(1,)`` int32, counts the numbers written that are NaN or infinite in the caches' type.
        trust: factor on all but the mean correction.
        pair_step, pair_distance: pair ``i`` is the channels ``i * pair_step`` and that plus ``pair_distance``.
        rest_tile: 0 if all channels are rotated.
        precision: of the products of float32 numbers, as Triton names it.
    """
    head = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * tokens_tile + tl.arange(0, tokens_tile)
    real = token < tokens
    token = token.to(tl.int64)
    inner = tl.arange(0, rank_tile)
    # Masks come from comparing blocks with bounds: Triton's interpreter takes no block of booleans & a single one.
    corrected = tl.minimum(layer, 1)
    used = inner < rank * corrected
    bound = dim * corrected
    row = tl.maximum(layer - 1, 0) * kv_heads + head
    down_keys += row * (rank + 1) * dim
    down_values += row * (rank + 1) * dim
    down_position += row * (rank + 1) * features
    up_keys += row * (rank + 1) * dim
    up_values += row * (rank + 1) * dim
    keys += layer * key_layer + head * key_head
    values += layer * value_layer + head * value_head

    pair = tl.arange(0, pairs_tile)
    paired = pair < pairs
    first, second = pair * pair_step, pair * pair_step + pair_distance
    channel = tl.arange(0, dim_tile)
    whole = channel < dim
    a = _gather(keys, token, real, first, paired, key_token, key_channel)
    b = _gather(keys, token, real, second, paired, key_token, key_channel)
    v = _gather(values, token, real, channel, whole, value_token, value_channel)

    hidden = tl.zeros((tokens_tile, rank_tile), tl.float32)
    for feature in tl.static_range(features):
        place = tl.load(position + feature * tokens + token, mask=real, other=0.0)
        weight = tl.load(down_position + inner * features + feature, mask=used, other=0.0)
        hidden += place[:, None] * weight[None, :]
    hidden = _down(hidden, a, down_keys, inner, used, first, paired, dim, precision)
    hidden = _down(hidden, b, down_keys, inner, used, second, paired, dim, precision)
    hidden = _down(hidden, v, down_values, inner, used, channel, whole, dim, precision)
    if rest_tile > 0:
        other = 2 * pairs + tl.arange(0, rest_tile)
        left = other < dim
        c = _gather(keys, token, real, other, left, key_token, key_channel)
        hidden = _down(hidden, c, down_keys, inner, used, other, left, dim, precision)
    hidden *= trust

    up = rank + 1
    a = _up(a, hidden, up_keys, inner, used, 1, first, paired, up, rank, bound, precision)
    b = _up(b, hidden, up_keys, inner, used, 1, second, paired, up, rank, bound, precision)
    v = _up(v, hidden, up_values, inner, used, dim, channel, whole, 1, rank, bound, precision)
    turn = token[:, None] * pairs + pair[None, :]
    turned = real[:, None] & paired[None, :]
    cosine = tl.load(cosines + turn, mask=turned, other=1.0)
    sine = tl.load(sines + turn, mask=turned, other=0.0)

    slot = tl.load(slots + token, mask=real, other=0)
    cache = tl.load(caches + layer).to(tl.pointer_type(keys.dtype.element_ty))
    number, inside = slot // block, slot % block
    own = cache + cache_keys + head * cache_key_head
    target = number * cache_block + inside * cache_key_token
    count = _scatter(own, target, real, first, paired, cache_key_channel, a * cosine - b * sine)
    count += _scatter(own, target, real, second, paired, cache_key_channel, a * sine + b * cosine)
    if rest_tile > 0:
        c = _up(c, hidden, up_keys, inner, used, 1, other, left, up, rank, bound, precision)
        count += _scatter(own, target, real, other, left, cache_key_channel, c)
    own = cache + cache_values + head * cache_value_head
    target = number * cache_block + inside * cache_value_token
    count += _scatter(own, target, real, channel, whole, cache_value_channel, v)
    if count > 0:
        tl.atomic_add(not_finite, count)


@triton.jit
def _gather(part, token, real, channel, wanted, by_token, by_channel):
    """Channels of the tile's tokens, ``(tokens_tile, channels)`` in float32; zeros outside."""
    places = token[:, None] * by_token + channel[None, :] * by_channel
    return tl.load(part + places, mask=real[:, None] & wanted[None, :], other=0.0).to(tl.float32)


@triton.jit
def _down(hidden, part, matrix, inner, used, channel, wanted, by_inner, precision: tl.constexpr):
    """``hidden`` ``(tokens_tile, rank_tile)`` with what the channels ``part`` ``(tokens_tile, channels)`` add to it."""
    places = channel[:, None] + inner[None, :] * by_inner
    weights = tl.load(matrix + places, mask=wanted[:, None] & used[None, :], other=0.0)
    return tl.dot(part, weights, hidden, input_precision=precision)


@triton.jit
def _up(
    part, hidden, matrix, inner, used, by_inner, channel, wanted, by_channel, rank: tl.constexpr, bound,
    precision: tl.constexpr,
):  # fmt: skip
    """``part`` ``(tokens_tile, channels)`` with what hidden channels and the mean correction add to it.

    ``bound``: of the channels that the mean corrects; 0 in a layer that is not corrected.
    """
    places = inner[:, None] * by_inner + channel[None, :] * by_channel
    weights = tl.load(matrix + places, mask=used[:, None] & wanted[None, :], other=0.0)
    mean = tl.load(matrix + rank * by_inner + channel * by_channel, mask=wanted & (channel < bound), other=0.0)
    return tl.dot(hidden, weights, part + mean[None, :], input_precision=precision)


@triton.jit
def _scatter(cache, target, real, channel, wanted, by_channel, numbers):
    """Write ``(tokens_tile, channels)`` in the cache's type; returns how many of them are not finite in it."""
    here = real[:, None] & wanted[None, :]
    rounded = numbers.to(cache.dtype.element_ty)
    tl.store(cache + target[:, None] + channel[None, :] * by_channel, rounded, mask=here)
    finite = tl.abs(rounded.to(tl.float32)) <= LARGEST
    return tl.sum(tl.sum(tl.where(here & (finite == 0), 1, 0), axis=1), axis=0)
