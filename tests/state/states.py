"""States learned from random numbers."""

from __future__ import annotations

import torch

from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.policies.ridge import Ridge
from kvcomm_integrations.state.learned import LearnedState, take_from
from kvcomm_integrations.state.manifest import HeadRange, ModelIdentity

LAYERS, HEADS, DIM = 3, 4, 4
MODEL = ModelIdentity(
    name="org/model", config="c0ffee", weights="abad1dea", dtype="float32", layers=LAYERS, kv_heads=HEADS, head_dim=DIM
)
ALL = HeadRange(first=0, count=HEADS)

Example = tuple[Edge, KV, KV]


def edge(target: str = "solver", tenant: str = "acme") -> Edge:
    return Edge("planner", target, "user_question", f'["salt", "{tenant}"]')


def examples(*edges: Edge, seed: int = 0) -> list[Example]:
    """One example of every edge named, in order, from reproducible noise."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tokens: int) -> torch.Tensor:
        return torch.randn(LAYERS, HEADS, tokens, DIM, generator=generator)

    made = []
    for number, name in enumerate(edges):
        tokens = 5 + 3 * number
        reference = KV(3 + noise(tokens), noise(tokens))
        truth = KV(*(part * 0.9 + 0.2 + 0.1 * noise(tokens) for part in reference))
        truth.keys[0], truth.values[0] = reference.keys[0], reference.values[0]
        made.append((name, reference, truth))
    return made


def taught(lessons: list[Example], heads: HeadRange = ALL) -> Ridge:
    """A policy that has seen these heads of the examples."""
    ridge, part = Ridge(), slice(heads.first, heads.end)
    for name, reference, truth in lessons:
        ridge.observe(name, *(KV(kv.keys[:, part], kv.values[:, part]) for kv in (reference, truth)))
    return ridge


def state(lessons: list[Example], heads: HeadRange = ALL, model: ModelIdentity = MODEL) -> LearnedState:
    return take_from(taught(lessons, heads), model, heads)


def equal(a: LearnedState, b: LearnedState, rtol: float = 0.0) -> None:
    """Same edges, counts and numbers, edges in any order."""
    mine, theirs = ({e.edge: e for e in s.edges} for s in (a, b))
    assert mine.keys() == theirs.keys()
    for name, known in mine.items():
        other = theirs[name]
        assert (known.examples, known.rows) == (other.examples, other.rows)
        torch.testing.assert_close(known.mean, other.mean, rtol=rtol, atol=rtol)
        torch.testing.assert_close(known.scatter, other.scatter, rtol=rtol, atol=rtol * 10)
