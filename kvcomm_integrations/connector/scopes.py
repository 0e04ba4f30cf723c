"""Who holds references, and since when nobody has asked for them: sessions end by release, or by idleness."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Scope:
    """References that the same requests may load."""

    last_use: float
    refs: set[int] = field(default_factory=set)
    live: int = 0
    """Requests that are running or waiting."""


class ScopeBook:
    """Scopes with references or live requests, the longest idle first."""

    def __init__(self) -> None:
        self._scopes: OrderedDict[str, Scope] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scopes)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._scopes))

    def refs(self, name: str) -> tuple[int, ...]:
        """References of a scope."""
        scope = self._scopes.get(name)
        return tuple(scope.refs) if scope is not None else ()

    def active(self, name: str) -> bool:
        """Whether a request of the scope is live."""
        scope = self._scopes.get(name)
        return scope is not None and scope.live > 0

    def enter(self, name: str, now: float) -> None:
        """A request of the scope has arrived."""
        self.use(name, now).live += 1

    def leave(self, name: str, now: float) -> None:
        """It has ended."""
        self.use(name, now).live -= 1
        self._tidy(name)

    def use(self, name: str, now: float) -> Scope:
        """The scope is in use at this moment."""
        scope = self._scopes.setdefault(name, Scope(now))
        scope.last_use = now
        self._scopes.move_to_end(name)
        return scope

    def add(self, name: str, ref_id: int, now: float) -> None:
        """A scope holds one more reference."""
        self.use(name, now).refs.add(ref_id)

    def remove(self, name: str, ref_id: int) -> None:
        """It holds one less; a scope without references and requests is forgotten."""
        scope = self._scopes.get(name)
        if scope is not None:
            scope.refs.discard(ref_id)
            self._tidy(name)

    def idle(self, before: float) -> list[str]:
        """Scopes without live requests that were used last before a moment."""
        found = []
        for name, scope in self._scopes.items():
            if scope.last_use >= before:
                break
            if not scope.live:
                found.append(name)
        return found

    def _tidy(self, name: str) -> None:
        scope = self._scopes[name]
        if not scope.refs and scope.live <= 0:
            del self._scopes[name]
