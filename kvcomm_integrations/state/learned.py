"""Learned corrections as tensors by edge: taken from a policy, split by head, joined, merged, loaded into a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from kvcomm_integrations.errors import StateFileError
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.moments import Moments
from kvcomm_integrations.reuse.policies.policy import Policy
from kvcomm_integrations.reuse.policies.ridge import Ridge
from kvcomm_integrations.reuse.regression import DECAYS, EdgeRegression
from kvcomm_integrations.state.manifest import HeadRange, ModelIdentity, tenant_of

LEARNS = {"ridge": f"moments of [K | V | position | dK | dV], decays {DECAYS}"}
"""What the numbers of each policy that can be saved mean."""

NO_LIMIT = 1 << 62


class LearnedEdge(NamedTuple):
    """What one edge has learned, for some of the model's heads."""

    edge: Edge
    examples: int
    """Dense observations."""
    rows: int
    """Tokens they had together."""
    mean: torch.Tensor
    """``(layers - 1, kv_heads, channels)``, float32."""
    scatter: torch.Tensor
    """``(layers - 1, kv_heads, features, channels)``, float32. See `EdgeRegression` for features and channels."""


@dataclass(frozen=True, eq=False)
class LearnedState:
    """All edges of one policy on one model, or one rank's share of them. Fields mean the same as in `StateManifest`."""

    model: ModelIdentity
    policy: str
    heads: HeadRange
    edges: tuple[LearnedEdge, ...]
    tenant: str | None = None
    layout: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all edges."""
        return sum(edge.mean.nbytes + edge.scatter.nbytes for edge in self.edges)

    def of_heads(self, heads: HeadRange) -> LearnedState:
        """What a rank with these heads needs.

        Raises:
            StateFileError: some of them are not inside.
        """
        if heads.first < self.heads.first or heads.end > self.heads.end:
            raise StateFileError(
                f"heads {heads.first} to {heads.end - 1} are needed, but only {self.heads.first} to "
                f"{self.heads.end - 1} are in this state: join the shards of all ranks first (kvcomm state merge)"
            )
        part = slice(heads.first - self.heads.first, heads.end - self.heads.first)
        edges = (
            edge._replace(mean=edge.mean[:, part].contiguous(), scatter=edge.scatter[:, part].contiguous())
            for edge in self.edges
        )
        return replace(self, heads=heads, edges=tuple(edges))

    def of_tenant(self, tenant: str) -> LearnedState:
        """The edges of one tenant."""
        edges = tuple(edge for edge in self.edges if tenant_of(edge.edge.scope) == tenant)
        return replace(self, edges=edges, tenant=tenant)


def require_saveable(policy: str) -> str:
    """What the numbers of a policy mean, for the manifest.

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
        policy: one that `require_saveable` accepts.
        model: what it learned on.
        heads: the heads of this rank.
        more: further fields of `LearnedState`.
    """
    edges = tuple(_edge_of(edge, known, heads.count) for edge, known in _saveable(policy).states.items())
    return LearnedState(model, policy.name, heads, edges, **more)


def give_to(policy: Policy, state: LearnedState, device: torch.device | None = None, *, merge: bool = False) -> None:
    """Load a state into a policy, replacing what it has learned or (``merge``) adding to it.

    The tensors go to ``device``, by default they stay where they are.
    """
    ridge = _saveable(policy)
    learned = {known.edge: _regression_of(known, ridge.rank, device) for known in state.edges}
    if not merge:
        ridge.states.clear()
    ridge.merge(learned)


def merge_states(states: Sequence[LearnedState]) -> LearnedState:
    """The state of one engine that had seen the examples of all of them.

    Raises:
        StateFileError: they are of different models, policies or heads.
    """
    first = states[0]
    total = Ridge(max_bytes=NO_LIMIT)
    for state in states:
        _check_alike(first, state)
        if state.heads != first.heads:
            raise StateFileError(
                f"heads {state.heads.first} to {state.heads.end - 1} do not merge into {first.heads.first} to "
                f"{first.heads.end - 1}"
            )
        give_to(total, state, merge=True)
    tenant = first.tenant if all(state.tenant == first.tenant for state in states) else None
    return replace(first, edges=take_from(total, first.model, first.heads).edges, tenant=tenant)


def join_shards(shards: Sequence[LearnedState]) -> LearnedState:
    """One state from the shares of all ranks of one engine. Ranks that hold copies of the same heads count once.

    Raises:
        StateFileError: a rank is missing, or the shares are not of one engine.
    """
    ordered = sorted(shards, key=lambda shard: shard.heads.first)
    first, parts, end = ordered[0], [], 0
    for shard in ordered:
        _check_alike(first, shard)
        if shard.heads.end <= end:
            continue
        if shard.heads.first != end:
            raise StateFileError(f"the share with head {end} is missing; shares must come from all ranks of one save")
        parts.append(shard.edges)
        end = shard.heads.end
    if end != first.model.kv_heads:
        raise StateFileError(f"only {end} of {first.model.kv_heads} heads are there; a rank's share is missing")
    known = [(edge.edge, edge.examples, edge.rows) for edge in first.edges]
    if any([(edge.edge, edge.examples, edge.rows) for edge in edges] != known for edges in parts):
        raise StateFileError("ranks have learned different edges or examples; their shares do not belong together")
    edges = []
    for same in zip(*parts, strict=True):
        mean, scatter = torch.cat([edge.mean for edge in same], 1), torch.cat([edge.scatter for edge in same], 1)
        edges.append(same[0]._replace(mean=mean, scatter=scatter))
    return replace(first, heads=HeadRange(first=0, count=end), edges=tuple(edges))


def _check_alike(mine: LearnedState, other: LearnedState) -> None:
    if mine.policy != other.policy:
        raise StateFileError(f"states of policies {mine.policy!r} and {other.policy!r} do not merge")
    difference = mine.model.difference(other.model)
    if difference is not None:
        raise StateFileError(f"states of different models do not merge: the second has {difference}")


def _saveable(policy: Policy) -> Ridge:
    require_saveable(policy.name)
    assert isinstance(policy, Ridge)
    return policy


def _edge_of(edge: Edge, known: EdgeRegression, heads: int) -> LearnedEdge:
    assert known.kv_heads == heads, f"the policy has learned {known.kv_heads} heads on a rank with {heads}"
    moments = known.moments
    mean, scatter = (part.to("cpu", copy=True).unflatten(0, (-1, heads)) for part in (moments.mean, moments.scatter))
    return LearnedEdge(edge, known.examples, moments.rows, mean, scatter)


def _regression_of(known: LearnedEdge, rank: int, device: torch.device | None) -> EdgeRegression:
    layers, kv_heads, features, channels = known.scatter.shape
    mean, scatter = (part.flatten(0, 1).to(device) for part in (known.mean, known.scatter))
    moments = Moments(known.rows, mean, scatter)
    return EdgeRegression(layers + 1, kv_heads, (channels - features) // 2, rank, known.examples, moments)
