"""Requests whose prompts hold estimates and are worth computing again, exactly, when the engine has nothing to do.

One of them teaches its edges, tells how far what was served was from dense, and *settles* its conversation: the next
turn of the same agent then begins with exact blocks in place of carried estimates.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvcomm_integrations.planning.plan import Planned
from kvcomm_integrations.planning.resolved_prompt import ResolvedPrompt

MOST_TOKENS = 1 << 20
"""Tokens of all waiting tasks together: what bounds their memory."""
OLDEST_S = 600.0
"""Age at which a task is given up, seconds: its conversation has hardly waited so long for its next turn."""
MOST_TRIES = 3
"""Times a task is begun before it is given up."""


@dataclass(frozen=True, eq=False)
class ShadowTask:
    """A finished request that is to be computed again.

    Args:
        prompt: its prompt.
        answer: its answer's token ids, all of them.
        served: the plan that was carried out; ``None`` where it only took over estimates.
        estimates: tokens of the prompt whose KV was an estimate.
        young: an edge that it was loaded over has still much to learn.
        salt: its cache salt.
        born: monotonic time of its end, seconds.
        tries: how often it has been begun.
    """

    prompt: ResolvedPrompt
    answer: tuple[int, ...]
    served: Planned | None
    estimates: int
    young: bool
    salt: str | None
    born: float
    tries: int = 0

    @property
    def token_ids(self) -> list[int]:
        """What is computed: the prompt, and the answer without its last token, which no block holds."""
        return [*self.prompt.token_ids, *self.answer[:-1]]


class ShadowQueue:
    """Tasks that wait, one for each agent of a session: a later turn of it says all that the earlier one did.

    Args:
        limit: most tasks; the least valuable are given up.
        clock: monotonic time, seconds.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._tasks: dict[tuple[str, ...], ShadowTask] = {}
        self.given_up = 0
        """Tasks that were dropped since the start: too many, too old, begun too often or of no use any more."""

    def add(self, task: ShadowTask) -> None:
        """Let a task wait; it replaces an earlier one of the same agent and session."""
        with self._lock:
            key = task.prompt.lineage
            waiting = self._tasks.pop(key, None)
            if waiting is not None:
                self.given_up += 1
            self._tasks[key] = task if waiting is None or waiting.born <= task.born else waiting
            while len(self._tasks) > self._limit or sum(map(_length, self._tasks.values())) > MOST_TOKENS:
                del self._tasks[min(self._tasks, key=lambda key: _value(self._tasks[key]))]
                self.given_up += 1

    def take(self) -> ShadowTask | None:
        """The most valuable task, begun once more; ``None`` if none waits."""
        with self._lock:
            oldest = self._clock() - OLDEST_S
            for key in [key for key, task in self._tasks.items() if task.born < oldest or task.tries >= MOST_TRIES]:
                del self._tasks[key]
                self.given_up += 1
            if not self._tasks:
                return None
            task = self._tasks.pop(max(self._tasks, key=lambda key: _value(self._tasks[key])))
            return replace(task, tries=task.tries + 1)

    def forget_session(self, tenant: str, session: str) -> None:
        """Nothing of a session is computed any more."""
        with self._lock:
            for key in [key for key in self._tasks if key[:2] == (tenant, session)]:
                del self._tasks[key]
                self.given_up += 1

    def clear(self) -> None:
        """Give up all tasks."""
        with self._lock:
            self.given_up += len(self._tasks)
            self._tasks.clear()

    def __len__(self) -> int:
        return len(self._tasks)


def _length(task: ShadowTask) -> int:
    return task.prompt.length + len(task.answer)


def _value(task: ShadowTask) -> tuple[bool, int, float]:
    """What teaches an edge that knows little comes first, then what holds most estimates, then what is newest."""
    return task.young, task.estimates, task.born
