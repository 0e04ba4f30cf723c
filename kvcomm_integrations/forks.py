"""What forked children have to renew or leave alone: locks, threads, connections. Imports nothing of ours.

A child has one thread, the one that called ``fork``. Locks that other threads held are never released in it, loops of
other threads stand still, and sockets are shared with the parent.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakSet

logger = logging.getLogger(__name__)


class Forkable(Protocol):
    """Something that is told when it finds itself in a forked child."""

    def after_fork(self) -> None:
        """Renew what the child needs. Its one thread calls this before ``fork`` returns there."""


_watched: WeakSet[Forkable] = WeakSet()
_abandoned: list[object] = []


def watch(thing: Forkable) -> None:
    """Call ``thing.after_fork()`` in every forked child, as long as ``thing`` lives."""
    _watched.add(thing)


def abandon(*things: object) -> None:
    """Keep what belongs to the parent until this child ends, so that no destructor of it runs here."""
    _abandoned.extend(things)


def let_go(descriptors: Iterable[int]) -> None:
    """Close this child's copies of descriptors; the parent's stay open.

    The numbers stay taken, by ``/dev/null``: what still knows one can then do no harm to the parent or to another file.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _in_child() -> None:
    for thing in list(_watched):
        try:
            thing.after_fork()
        except Exception:
            logger.exception("%s could not be made ready for a forked child", type(thing).__name__)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
