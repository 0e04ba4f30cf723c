"""What learning policies share: state by edge within a byte budget, and a check of what they are taught."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.kv import KV


class Sized(Protocol):
    """State that knows how many bytes it takes."""

    @property
    def nbytes(self) -> int:
        """Bytes taken now."""


State = TypeVar("State", bound=Sized)


class EdgeStates(Generic[State]):
    """State by edge, in order of use; the least recently used is evicted when all together exceed the budget.

    Args:
        max_bytes: budget. One edge may exceed it alone: evicting what was just learned would help nobody.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._states: dict[Edge, State] = {}

    def get(self, edge: Edge) -> State | None:
        """The state of an edge, which becomes the most recently used."""
        state = self._states.pop(edge, None)
        if state is not None:
            self._states[edge] = state
        return state

    def peek(self, edge: Edge) -> State | None:
        """The state of an edge; its order is not touched."""
        return self._states.get(edge)

    def put(self, edge: Edge, state: State) -> None:
        """Set the state of an edge, which becomes the most recently used."""
        self._states.pop(edge, None)
        self._states[edge] = state

    def evict(self) -> None:
        """Drop the least recently used until the budget holds."""
        while len(self._states) > 1 and self.nbytes > self.max_bytes:
            del self._states[next(iter(self._states))]

    def forget(self, edge: Edge) -> None:
        """Drop an edge; unknown ones are ignored."""
        self._states.pop(edge, None)

    @property
    def nbytes(self) -> int:
        """Bytes of all edges."""
        return sum(state.nbytes for state in self._states.values())

    def state_bytes(self, edge: Edge | None) -> int:
        """Bytes of one edge (0 if unknown) or of all."""
        if edge is None:
            return self.nbytes
        state = self._states.get(edge)
        return 0 if state is None else state.nbytes

    def __iter__(self) -> Iterator[Edge]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


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


def check_range(policy: str, option: str, value: float, low: float, high: float | None = None) -> None:
    """Refuse an option out of ``[low, high]``.

    Raises:
        ConfigurationError: it is.
    """
    if not low <= value or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigurationError(f"policy {policy!r}: {option}={value!r} must be {bound}")
