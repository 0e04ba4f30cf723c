"""Learned corrections as tensors by edge: taken from a policy, split by head, joined, merged and given back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvcomm_integrations.errors import StateFileError
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.policies.policy import Policy
from kvcomm_integrations.reuse.policies.ridge import Ridge
from kvcomm_integrations.reuse.regression import DECAYS
from kvcomm_integrations.state.manifest import HeadRange, ModelIdentity, tenant_of

LEARNS = {"ridge": f"moments of [K | V | position | dK | dV], decays {DECAYS}"}
"""What the numbers of each policy that can be saved mean."""

NO_LIMIT = 1 << 62


@dataclass(frozen=True, eq=False)
class LearnedEdge:
    """What one edge has learned, for some of the model's heads.

    Args:
        examples: dense observations.
        rows: tokens they had together.
        mean: ``(layers - 1, kv_heads, channels)``, float32.
        scatter: ``(layers - 1, kv_heads, features, channels)``, float32.
    """

    edge: Edge
    examples: int
    rows: int
    mean: torch.Tensor
    scatter: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.mean.nbytes + self.scatter.nbytes


@dataclass(frozen=True, eq=False)
class LearnedState:
    """All edges of one policy on one model, or one rank's share of them."""

    model: ModelIdentity
    policy: str
    heads: HeadRange
    edges: tuple[LearnedEdge, ...]
    tenant: str | None = None
    layout: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def learns(self) -> str:
        """What the numbers mean."""
        return LEARNS[self.policy]

    @property
    def nbytes(self) -> int:
        """Bytes of all edges."""
        return sum(edge.nbytes for edge in self.edges)

    def of_heads(self, heads: HeadRange) -> LearnedState:
        """The part that a rank with these heads needs.

        Raises:
            StateFileError: some of them are not inside.
        """
        if heads.first < self.heads.first or heads.end > self.heads.end:
            raise StateFileError(
                f"heads {heads.first} to {heads.end - 1} are needed, but only {self.heads.first} to "
                f"{self.heads.end - 1} are in this state: join the shards of all ranks first (kvcomm state merge)"
            )
        part = slice(heads.first - self.heads.first, heads.end - self.heads.first)
        edges = tuple(
            replace(edge, mean=edge.mean[:, part].contiguous(), scatter=edge.scatter[:, part].contiguous())
            for edge in self.edges
        )
        return replace(self, heads=heads, edges=edges)

    def of_tenant(self, tenant: str) -> LearnedState:
        """The edges of one tenant."""
        edges = tuple(edge for edge in self.edges if tenant_of(edge.edge.scope) == tenant)
        return replace(self, edges=edges, tenant=tenant)


def require_saveable(policy: str) -> str:
    """What a policy's numbers mean.

    Raises:
        StateFileError: this policy's state is not additive, so that it can neither be merged nor kept in files.
    """
    if policy not in LEARNS:
        raise StateFileError(
            f"what policy {policy!r} learns cannot be kept in a file; policies that can: {', '.join(LEARNS)}"
        )
    return LEARNS[policy]


def take_from(policy: Policy, model: ModelIdentity, heads: HeadRange, **more: Any) -> LearnedState:
    """A copy on the CPU of everything a policy has learned.

    Args:
        policy: one that ``require_saveable`` accepts.
        model: what it learned on.
        heads: the heads of this rank.
        more: further fields of ``LearnedState``.
    """
    require_saveable(policy.name)
    assert isinstance(policy, Ridge)
    edges = tuple(_edges_of(policy, heads.count))
    return LearnedState(model, policy.name, heads, edges, **more)


def give_to(policy: Policy, state: LearnedState, device: torch.device | None = None, *, merge: bool = False) -> None:
    """Let a policy know what ``state`` knows: instead of what it knew before, or (``merge``) in addition to it."""
    require_saveable(policy.name)
    assert isinstance(policy, Ridge)
    if not merge:
        policy.load_state_dict(_state_dict(state, device))
        return
    other = Ridge(max_bytes=NO_LIMIT)
    other.load_state_dict(_state_dict(state, device))
    policy.merge(other)


def merge_states(states: Sequence[LearnedState]) -> LearnedState:
    """What one engine would know that had seen all examples of several.

    Raises:
        StateFileError: they are of different models, policies, heads or tenants.
    """
    first, *others = states
    for other in others:
        _check_alike(first, other)
        if other.heads != first.heads:
            raise StateFileError(
                f"heads {other.heads.first} to {other.heads.end - 1} do not merge into {first.heads.first} to "
                f"{first.heads.end - 1}"
            )
    total = Ridge(max_bytes=NO_LIMIT)
    for state in states:
        give_to(total, state, merge=True)
    tenant = first.tenant if all(state.tenant == first.tenant for state in states) else None
    return replace(first, edges=tuple(_edges_of(total, first.heads.count)), tenant=tenant)


def join_shards(shards: Sequence[LearnedState]) -> LearnedState:
    """One state from the shares of all ranks of one engine. Ranks that hold copies of the same heads count once.

    Raises:
        StateFileError: a rank is missing, or the shares are not of one engine.
    """
    ordered = sorted(shards, key=lambda shard: shard.heads.first)
    first = ordered[0]
    parts, end = [], 0
    for shard in ordered:
        _check_alike(first, shard)
        if shard.heads.end <= end:
            continue
        if shard.heads.first != end:
            raise StateFileError(f"the share with head {end} is missing; shares must come from all ranks of one save")
        parts.append(shard)
        end = shard.heads.end
    if end != first.model.kv_heads:
        raise StateFileError(f"only {end} of {first.model.kv_heads} heads are there; a rank's share is missing")
    known = [(edge.edge, edge.examples, edge.rows) for edge in first.edges]
    for part in parts:
        if [(edge.edge, edge.examples, edge.rows) for edge in part.edges] != known:
            raise StateFileError("ranks have learned different edges or examples; their shares do not belong together")
    edges = tuple(
        replace(
            same[0],
            mean=torch.cat([edge.mean for edge in same], dim=1),
            scatter=torch.cat([edge.scatter for edge in same], dim=1),
        )
        for same in zip(*(part.edges for part in parts), strict=True)
    )
    return replace(first, heads=HeadRange(first=0, count=end), edges=edges)


def _check_alike(mine: LearnedState, other: LearnedState) -> None:
    if mine.policy != other.policy:
        raise StateFileError(f"states of policies {mine.policy!r} and {other.policy!r} do not merge")
    difference = mine.model.difference(other.model)
    if difference is not None:
        raise StateFileError(f"states of different models do not merge: the second has {difference}")


def _edges_of(policy: Ridge, heads: int) -> Iterable[LearnedEdge]:
    parts: dict[Edge, dict[str, torch.Tensor]] = {}
    for key, tensor in policy.state_dict().items():
        *edge, part = json.loads(key)
        parts.setdefault(Edge(*edge), {})[part] = tensor
    for edge_key, tensors in parts.items():
        _, kv_heads, _, examples, rows = tensors["counts"].tolist()
        assert kv_heads == heads, f"the policy has learned {kv_heads} heads on a rank with {heads}"
        mean, scatter = (tensors[name].detach().to("cpu", torch.float32) for name in ("mean", "scatter"))
        yield LearnedEdge(
            edge_key, examples, rows, mean.unflatten(0, (-1, heads)).clone(), scatter.unflatten(0, (-1, heads)).clone()
        )


def _state_dict(state: LearnedState, device: torch.device | None) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    shape = (state.model.layers, state.heads.count, state.model.head_dim)
    for edge in state.edges:
        tensors[json.dumps([*edge.edge, "counts"])] = torch.tensor((*shape, edge.examples, edge.rows))
        tensors[json.dumps([*edge.edge, "mean"])] = edge.mean.flatten(0, 1).to(device)
        tensors[json.dumps([*edge.edge, "scatter"])] = edge.scatter.flatten(0, 1).to(device)
    return tensors
