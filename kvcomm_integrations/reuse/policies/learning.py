"""The base of policies that learn: one state per edge, within a byte budget."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.policies.policy import Policy


class Sized(Protocol):
    """State that knows its size."""

    @property
    def nbytes(self) -> int:
        """Bytes taken now."""


State = TypeVar("State", bound=Sized)


@dataclass
class LearningPolicy(Policy, Generic[State]):
    """A policy with a state for every edge it has learned. The least recently used are evicted beyond the budget.

    Subclasses read states with ``states.get`` or `_use`, and put what they have learned back with `_keep`.

    Args:
        max_bytes (int, 1 GiB): budget for all edges. One edge alone may exceed it: evicting what has just been learned
            would only waste it.
    """

    max_bytes: int = field(default=1 << 30, kw_only=True)
    states: OrderedDict[Edge, State] = field(default_factory=OrderedDict, init=False, repr=False)
    """State by edge, least recently used first."""

    def __post_init__(self) -> None:
        self._check_range("max_bytes", 0)

    def edges(self) -> tuple[Edge, ...]:
        return tuple(self.states)

    def state_bytes(self, edge: Edge | None = None) -> int:
        if edge is None:
            return sum(state.nbytes for state in self.states.values())
        state = self.states.get(edge)
        return 0 if state is None else state.nbytes

    def forget(self, edge: Edge) -> None:
        self.states.pop(edge, None)

    def _use(self, edge: Edge) -> State | None:
        """The state of an edge, which becomes the most recently used."""
        if edge in self.states:
            self.states.move_to_end(edge)
        return self.states.get(edge)

    def _keep(self, edge: Edge, state: State) -> None:
        """Set the state of an edge, which becomes the most recently used, and evict others down to the budget."""
        self.states[edge] = state
        self.states.move_to_end(edge)
        self._evict()

    def _evict(self) -> None:
        while len(self.states) > 1 and self.state_bytes() > self.max_bytes:
            self.states.popitem(last=False)


def check_example(reference: KV, truth: KV) -> int:
    """Number of tokens of an example.

    Raises:
        ValueError: reference and truth are not KV of the same tokens.
    """
    shapes = {tuple(tensor.shape[:3]) for tensor in (*reference, *truth)}
    if len(shapes) != 1 or reference.keys.ndim != 4:
        raise ValueError(
            f"reference {tuple(reference.keys.shape)} and truth {tuple(truth.keys.shape)} are not "
            "(layers, kv_heads, tokens, head_dim) of the same tokens"
        )
    return reference.keys.shape[2]
