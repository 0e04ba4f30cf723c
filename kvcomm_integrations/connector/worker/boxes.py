"""Cutting a copy of a span of tokens into copies of strided views. Numbers only, no tensors.

A token's place is a number of several digits: its block, its tile in the block, its place in the tile. Tokens
``[start, end)`` are a box of such digits, or a few: the end of a first tile, whole tiles, the beginning of a last one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

FEW = 4
"""A last digit of up to so many values, side by side in memory, would be a very short inner loop of a copy."""


@dataclass(frozen=True)
class Grid:
    """Where in memory the numbers of a layer are, ``(kv_heads, *token digits, *channel digits)``.

    A token's first digit is its block, or the place of its block in the sequence; it is not limited.
    """

    base: int
    head_stride: int
    tokens: tuple[int, ...]
    """Strides of a token's digits."""
    channels: tuple[int, ...]
    """Strides of a channel's digits."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of all dimensions."""
        return (self.head_stride, *self.tokens, *self.channels)

    def at(self, token: Sequence[int]) -> int:
        """Where the token with these digits begins."""
        return self.base + sum(digit * stride for digit, stride in zip(token, self.tokens, strict=True))

    def joined(self, count: int) -> Grid | None:
        """The same with all ``count`` values of the last channel digit as one number; ``None`` if that cannot be."""
        rest = (self.base, self.head_stride, *self.tokens, *self.channels[:-1])
        if self.channels[-1] != 1 or any(number % count for number in rest):
            return None
        tokens, channels = (tuple(s // count for s in part) for part in (self.tokens, self.channels[:-1]))
        return Grid(self.base // count, self.head_stride // count, tokens, channels)

    def of_token(self, number: int) -> Grid:
        """Only the tokens whose last digit this is."""
        return replace(self, base=self.base + number * self.tokens[-1], tokens=self.tokens[:-1])

    def of_channel(self, number: int) -> Grid:
        """Only the channels whose last digit this is."""
        return replace(self, base=self.base + number * self.channels[-1], channels=self.channels[:-1])


class Box(NamedTuple):
    """Two strided views that show the same numbers: one of a layer's cache, one of a span's own memory."""

    joined: int
    """Neighbours that make one number of these views; offsets and strides count such numbers."""
    size: tuple[int, ...]
    cache: int
    """Where the view of the cache begins."""
    cache_strides: tuple[int, ...]
    own: int
    own_strides: tuple[int, ...]


class _Pair(NamedTuple):
    """Two grids whose numbers correspond, and the sizes of their digits."""

    cache: Grid
    own: Grid
    tokens: Sequence[int]
    channels: Sequence[int]
    joined: int = 1
    step: int = 1
    """Every how many tokens there is one."""
    first: int = 0
    """The first of them."""


def cut(
    cache: Grid,
    own: Grid,
    heads: int,
    tokens: Sequence[int],
    channels: Sequence[int],
    span: tuple[int, int],
    blocks: Sequence[int],
    joinable: Sequence[int] = (),
) -> list[Box]:
    """Cut the copy of a span of tokens into few boxes whose rows are not short.

    Args:
        cache, own: where the numbers are; the first digit of a token is its block in the one, the block's place in the
            sequence in the other.
        heads: KV heads.
        tokens: sizes of a token's digits in its block.
        channels: sizes of a channel's digits.
        span: first token of the sequence and one past the last.
        blocks: the sequence's block table.
        joinable: how many neighbours may be copied as one number.
    """
    boxes: list[Box] = []
    for pair in _without_short_rows(cache, own, tokens, channels, joinable):
        start, end = (-(-(place - pair.first) // pair.step) for place in span)
        for ranges in split(start, end, pair.tokens):
            for place, count in _consecutive(blocks, *ranges[0]):
                inner = [low for low, _ in ranges[1:]]
                size = (heads, count, *(high - low for low, high in ranges[1:]), *pair.channels)
                cached, mine = pair.cache.at([blocks[place], *inner]), pair.own.at([place, *inner])
                boxes.append(Box(pair.joined, size, cached, pair.cache.strides, mine, pair.own.strides))
    return boxes


def strides(sizes: Sequence[int], stride: int) -> tuple[int, ...]:
    """Strides of a digit of unlimited size and of digits of these sizes below it; the last one's is ``stride``."""
    return tuple(stride * math.prod(sizes[place:]) for place in range(len(sizes) + 1))


def split(start: int, end: int, sizes: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Cut ``[start, end)`` into as few boxes as can be: a range for each digit, the first of which is not limited.

    Args:
        start, end: numbers.
        sizes: of all digits but the first.
    """
    if start >= end:
        return
    if not sizes:
        yield ((start, end),)
        return
    inner = math.prod(sizes)
    low, high = -(-start // inner), end // inner
    if start < low * inner:  # begins within a digit, and maybe ends there
        before = (low - 1) * inner
        for ranges in split(start - before, min(end - before, inner), sizes[1:]):
            yield ((low - 1, low), *ranges)
    if low < high:
        yield ((low, high), *((0, size) for size in sizes))
    if low <= high and high * inner < end:
        for ranges in split(0, end - high * inner, sizes[1:]):
            yield ((high, high + 1), *ranges)


def _without_short_rows(
    cache: Grid, own: Grid, tokens: Sequence[int], channels: Sequence[int], joinable: Sequence[int]
) -> Iterator[_Pair]:
    """Get rid of a last digit whose few values lie side by side in the cache's memory."""
    if len(channels) > 1 and channels[-1] in joinable:
        wide = cache.joined(channels[-1]), own.joined(channels[-1])
        if wide[0] is not None and wide[1] is not None:
            yield _Pair(wide[0], wide[1], tokens, channels[:-1], joined=channels[-1])
            return
    if len(tokens) > 1 and cache.tokens[-1] == 1 and tokens[-1] <= FEW:
        for number in range(tokens[-1]):
            cached, mine = cache.of_token(number), own.of_token(number)
            yield _Pair(cached, mine, tokens[:-1], channels, step=tokens[-1], first=number)
    elif len(channels) > 1 and cache.channels[-1] == 1 and channels[-1] <= FEW:
        for number in range(channels[-1]):
            yield _Pair(cache.of_channel(number), own.of_channel(number), tokens, channels[:-1])
    else:
        yield _Pair(cache, own, tokens, channels)


def _consecutive(blocks: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut places of a block table into runs of blocks that follow each other: the first place and how many."""
    while start < end:
        count = 1
        while start + count < end and blocks[start + count] == blocks[start] + count:
            count += 1
        yield start, count
        start += count
