"""How much memory does what has been learned take? One edge is taught and measured; the rest is arithmetic.

The paper's set-up: fully connected agents, each of whose edges has seen 20 contents of 4,096 tokens. Anchors keep all
tokens of all contents, so their bytes per token are measured and multiplied; a ridge map does not grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.policies import create_policy

AGENTS = 4
EDGES = (AGENTS - 1) + AGENTS * (AGENTS - 1) // 2
"""The question to all but the first agent, every answer to all later agents."""
EXAMPLES = 20
TOKENS = 4096
TAUGHT_TOKENS = (48, 96)
"""Lengths of the contents that are really learned: state that grows with length shows in the difference."""
EDGE = Edge("a", "b", "text")


@dataclass(frozen=True)
class StateSize:
    """Bytes of what one policy has learned."""

    policy: str
    measured: tuple[int, ...]
    """Of one edge, for contents of each of ``TAUGHT_TOKENS``."""
    edge: int
    """Of one edge in the paper's set-up."""
    team: int
    """Of all edges of the team."""


def state_sizes(
    layers: int, heads: int, dim: int, policies: Sequence[str] = ("ridge", "kvcomm", "kvcmas")
) -> list[StateSize]:
    """Measure each policy on random float32 KV of a model's shape.

    Args:
        layers, heads, dim: layers, KV heads and channels of a head.
        policies: names.
    """
    sizes = []
    for name in policies:
        few, many = (_taught(name, torch.randn(2, layers, heads, tokens, dim)) for tokens in TAUGHT_TOKENS)
        short, long = TAUGHT_TOKENS
        edge = few + (many - few) * (TOKENS - short) // (long - short)
        sizes.append(StateSize(name, (few, many), edge, edge * EDGES))
    return sizes


def _taught(name: str, pair: torch.Tensor) -> int:
    """Bytes of an edge after ``EXAMPLES`` examples of the same keys and values (2, layers, heads, tokens, dim)."""
    policy = create_policy(name, max_bytes=1 << 40)
    kv = KV(*pair)
    for _ in range(EXAMPLES):
        policy.observe(EDGE, kv, KV(kv.keys * 1.1, kv.values))
    policy.prepare(EDGE)
    return policy.state_bytes(EDGE)
