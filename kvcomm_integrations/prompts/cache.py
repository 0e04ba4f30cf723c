"""A small thread-safe cache that forgets what was used longest ago."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

from kvcomm_integrations.forks import watch

V = TypeVar("V")


class BoundedCache(Generic[V]):
    """Least recently used entries go first once the summed weight passes ``capacity``."""

    def __init__(self, capacity: int) -> None:
        """Args:
        capacity: largest sum of weights held; an entry heavier than this is computed each time.
        """
        self._capacity = capacity
        self._weight = 0
        self._entries: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = Lock()
        watch(self)

    def after_fork(self) -> None:
        """In a forked child: a free lock, and nothing that a thread of the parent was in the middle of changing."""
        if self._lock.locked():
            self._entries.clear()
            self._weight = 0
        self._lock = Lock()

    def get(self, key: Hashable, weight: int, make: Callable[[], V]) -> V:
        """The value for ``key``, made (outside the lock) if it is not held."""
        with self._lock:
            held = self._entries.get(key)
            if held is not None:
                self._entries.move_to_end(key)
                return held[0]
        value = make()
        with self._lock:
            if key not in self._entries and weight <= self._capacity:
                self._entries[key] = (value, weight)
                self._weight += weight
                while self._weight > self._capacity:
                    _, (_, dropped) = self._entries.popitem(last=False)
                    self._weight -= dropped
        return value

    @property
    def weight(self) -> int:
        """Summed weight of what is held."""
        return self._weight

    def __len__(self) -> int:
        return len(self._entries)
