"""What does each step of a reuse cost, and how near is that to what the machine can do? Needs no engine.

Bytes are those that must move at least (what is read once and what is written once), operations those of the matrix
products. Shares are of the rates that a plain copy and a square product reach on the same machine in the same run.

And how much memory does what has been learned take, where every edge of fully connected agents has seen 20 contents of
4,096 tokens, as in the paper? One edge is taught and measured; the rest is arithmetic: anchors keep all tokens of all
contents, so their bytes per token are measured and multiplied; a ridge map does not grow.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from kvcomm_integrations.bench.admission import admission_steps
from kvcomm_integrations.bench.harness import progress, save_json, show
from kvcomm_integrations.bench.peak_rates import Machine, measure_machine, milliseconds
from kvcomm_integrations.connector.worker.paged_cache import Layout, PagedCache
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.policies import create_policy
from kvcomm_integrations.reuse.policies.ridge import Ridge
from kvcomm_integrations.reuse.rope import Rope
from kvcomm_integrations.reuse.scratch import Scratch

SIZES = (350, 3000)
"""Lengths of the loaded content, tokens."""
BLOCK, START = 128, 77
"""Tokens of a block, and the content's position in its prompt: not at a block's border."""
TAUGHT = 4
LIMIT = 0.03
"""Most that load, correction, rotation and write together may take of the dense prefill they replace."""
EDGE = Edge("a", "b", "text")
AGENTS, EXAMPLES, TOKENS = 4, 20, 4096
EDGES = (AGENTS - 1) + AGENTS * (AGENTS - 1) // 2
"""The question to all but the first agent, every answer to all later agents."""
TAUGHT_TOKENS = (48, 96)
"""Lengths of the contents that are really learned: state that grows with length shows in the difference."""


@dataclass(frozen=True)
class Cost:
    """One step on one length of content. ``bytes`` and ``flops`` are 0 where they mean nothing."""

    step: str
    tokens: int
    ms: float
    bytes: int = 0
    flops: int = 0


def shape_of(config: Any) -> tuple[int, int, int]:
    """Layers, KV heads and channels of a head of a model's cache."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, dim


class Bench:
    """The worker's tensors for a model's shape, filled with random numbers.

    Args:
        config: the model's configuration.
        tokens: length of the content.
        repeats: times each step runs; the median counts.
    """

    def __init__(self, config: Any, tokens: int, repeats: int) -> None:
        self.layers, self.heads, self.dim = shape_of(config)
        self.tokens, self.repeats = tokens, repeats
        self.rope = Rope.from_hf_config(config)
        self.blocks = tuple(range(2, 2 + -(-(START + tokens) // BLOCK)))
        shape = (len(self.blocks) + 2, self.heads, BLOCK, 2 * self.dim)
        self.cache = PagedCache([torch.zeros(shape) for _ in range(self.layers)], Layout.CPU)
        self.positions = torch.arange(START, START + tokens)
        self.scratch = Scratch()
        self.ridge = Ridge()
        for _ in range(TAUGHT):
            example = self.random_kv(min(tokens, 300))
            self.ridge.observe(EDGE, example, KV(example.keys * 1.1 + 0.1, example.values * 0.9))
        self.reference = self.random_kv(tokens)

    def random_kv(self, tokens: int) -> KV:
        """KV in the order in which harvests keep it."""
        keys = torch.randn(self.layers, self.heads, self.dim, tokens).transpose(2, 3)
        return KV(keys, torch.randn(self.layers, self.heads, tokens, self.dim))

    def costs(self) -> list[Cost]:
        """All steps of a load and of what prepares it."""
        kv = 2 * self.layers * self.heads * self.tokens * self.dim * 4
        maps = (self.layers - 1) * self.heads
        correct = 2 * maps * self.tokens * (self.ridge.rank + 1) * (4 * self.dim + 5)
        features = 2 * self.dim + 4
        learn = 2 * maps * self.tokens * features * (features + 2 * self.dim)
        truth = self.random_kv(self.tokens)
        steps: tuple[tuple[str, Callable[[], Any], int, int], ...] = (
            ("gather", self._gather, 2 * kv, 0),
            ("correct", lambda: self._load(rotate=False, write=False), 2 * kv, correct),
            ("correct + rotate", lambda: self._load(write=False), 2 * kv, correct),
            ("scatter", lambda: self.cache.write(self.blocks, START, self.reference), 2 * kv, 0),
            ("load (all of these, fused)", self._load, 2 * kv, correct),
            ("harvest", self._harvest, 2 * kv, 0),
            ("leverage", lambda: self.ridge.ready(EDGE, self.reference), 0, 0),
            ("observe", lambda: self.ridge.observe(EDGE, self.reference, truth), 2 * kv, learn),
            ("solve after an example", self._solve, 0, 0),
        )
        return [Cost(name, self.tokens, milliseconds(do, self.repeats), moved, ops) for name, do, moved, ops in steps]

    def _gather(self) -> None:
        for _ in self.scratch.copies(self.reference):
            pass

    def _load(self, *, rotate: bool = True, write: bool = True) -> None:
        for layers, kv in self.ridge.estimates(EDGE, self.reference, 0, self.scratch, leverage=0.5):
            if rotate:
                self.rope.rotate_rows(kv.keys.transpose(2, 3), self.positions, self.scratch)
            if write:
                self.cache.write(self.blocks, START, kv, layers.start)

    def _harvest(self) -> None:
        kv = self.cache.read(self.blocks, START, START + self.tokens, as_stored=True)
        for layers in self.scratch.chunks(kv.keys.shape):
            self.rope.rotate_rows(kv.keys[layers].transpose(2, 3), self.positions, self.scratch, inverse=True)

    def _solve(self) -> None:
        one = KV(self.reference.keys[:, :, :8], self.reference.values[:, :, :8])
        self.ridge.observe(EDGE, one, one)
        self.ridge.prepare(EDGE)


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


def state_sizes(layers: int, heads: int, dim: int) -> list[StateSize]:
    """Measure policies on random float32 KV of a model's shape: layers, KV heads and channels of a head."""
    sizes = []
    for name in ("ridge", "kvcomm", "kvcmas"):
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


def run_micro(args: argparse.Namespace) -> int:
    """Run ``kvcomm bench micro``; returns the exit status."""
    torch.manual_seed(args.seed)
    config = AutoConfig.from_pretrained(args.model).get_text_config()
    costs: list[Cost] = []
    replaced: list[dict[str, float]] = []
    with progress("measuring the machine") as step:
        machine = measure_machine(args.repeats)
        if not args.no_prefill:
            model = AutoModel.from_pretrained(args.model, dtype=torch.float32).eval()
        for tokens in args.tokens or SIZES:
            step(f"{tokens:,} tokens: steps of a reuse")
            found = Bench(config, tokens, args.repeats).costs()
            costs += found
            if not args.no_prefill:
                step(f"{tokens:,} tokens: dense prefill")
                load = next(cost.ms for cost in found if cost.step.startswith("load"))
                ids = torch.randint(0, config.vocab_size, (1, tokens))
                with torch.inference_mode():
                    dense = milliseconds(partial(model, ids, use_cache=True), min(args.repeats, 3))
                replaced.append({"tokens": tokens, "load_ms": load, "prefill_ms": dense, "share": load / dense})
        step("admission, and memory of what is learned")
        admission, sizes = dict(admission_steps(args.repeats)), state_sizes(*shape_of(config))
    _show_costs(machine, costs)
    for line in replaced:
        print(
            f"{line['tokens']:,} tokens: load {line['load_ms']:.1f} ms, dense prefill {line['prefill_ms']:,.0f} ms: "
            f"{line['share']:.2%} (at most {LIMIT:.0%} wanted)"
        )
    for name, ms in admission.items():
        print(f"{name}: {ms:.3f} ms")
    anchors = next(size.team for size in sizes if size.policy == "kvcomm")
    for size in sizes:
        print(
            f"state of {size.policy}, {AGENTS} agents, {EXAMPLES} examples of {TOKENS:,} tokens: "
            f"{size.team / 1e9:.3f} GB ({size.edge / 1e6:,.1f} MB an edge), 1/{anchors / size.team:.0f} of full anchors"
        )
    figures = {"machine": asdict(machine), "steps": list(map(asdict, costs)), "replaced": replaced}
    save_json(args, figures | {"admission_ms": admission, "state": list(map(asdict, sizes))})
    return 0


def _show_costs(machine: Machine, costs: list[Cost]) -> None:
    print(
        f"This machine, {machine.threads} threads: copy {machine.copy_gbps:.1f} GB/s (read and written), "
        f"product {machine.gemm_gflops:.0f} GFLOP/s"
    )

    def share(amount: int, ms: float, rate: float) -> tuple[str, str]:
        return (f"{amount / 1e6:,.0f}", f"{amount / ms / 1e6 / rate:.0%}") if amount else ("", "")

    headings = ("step", "tokens", "ms", "MB", "of the copy rate", "MFLOP", "of the product rate")
    rows = []
    for cost in costs:
        moved, done = share(cost.bytes, cost.ms, machine.copy_gbps), share(cost.flops, cost.ms, machine.gemm_gflops)
        rows.append((cost.step, f"{cost.tokens:,}", f"{cost.ms:.2f}", *moved, *done))
    show("Steps of a reuse (medians)", headings, rows, left="step")
