"""Saving and loading learned corrections on all workers of an engine at once: all of them do it, or none.

Every worker must see the file system that ``path`` is on. The engine goes on serving meanwhile; a call takes effect
between two of its steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcomm_integrations.errors import StateFileError

Call = Callable[..., Coroutine[Any, Any, list[Any]]]
"""``call(method, *args)`` runs a method of the worker extension on every worker: one answer each."""


@dataclass(frozen=True)
class StateSummary:
    """What was saved, loaded or forgotten."""

    edges: int
    examples: int = 0


async def save_state(call: Call, path: str | Path, tenant: str | None = None) -> StateSummary:
    """Write what all workers have learned to one file.

    Args:
        call: reaches the workers.
        path: the file; an existing one is replaced at once or not at all.
        tenant: save only this tenant's edges.

    Raises:
        StateFileError: the folder cannot be written, or the policy's state cannot be kept in a file.
    """
    place = state_place(path)
    answers = await call("kvcomm_save_state", str(place), tenant)
    shares = sorted({Path(answer["share"]) for answer in answers if "share" in answer} - {place})
    try:
        _checked(answers)
        if shares:
            await asyncio.to_thread(_join, place, shares)
    finally:
        await asyncio.to_thread(_remove, shares)
    return StateSummary(answers[0]["edges"], answers[0]["examples"])


async def load_state(call: Call, path: str | Path, tenant: str | None = None, *, merge: bool = False) -> StateSummary:
    """Let all workers know what a file holds.

    Args:
        call: reaches the workers.
        path: a file for the whole model, whatever the number of ranks that wrote it.
        tenant: refuse a file that is not this tenant's alone.
        merge: add to what is known instead of replacing it. Examples that are in both count twice.

    Raises:
        StateFileError: the file is damaged, too large, or of another model, policy or tenant; nothing was changed.
    """
    place = state_place(path)
    _checked(await call("kvcomm_load_state", str(place), tenant))
    [answer, *_] = _checked(await call("kvcomm_apply_state", merge))
    return StateSummary(answer["edges"], answer["examples"])


async def clear_state(call: Call, tenant: str | None = None) -> StateSummary:
    """Forget every learned correction, or one tenant's; returns how many edges there were."""
    [answer, *_] = _checked(await call("kvcomm_clear_state", tenant))
    return StateSummary(answer["edges"])


def state_place(path: str | Path) -> Path:
    """The absolute path of a state file; workers may have another working directory."""
    return Path(path).expanduser().absolute()


def _join(place: Path, shares: list[Path]) -> None:
    from kvcomm_integrations.state.files import read_state, write_state
    from kvcomm_integrations.state.learned import join_shards

    write_state(place, join_shards([read_state(share) for share in shares]))


def _remove(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _checked(answers: list[Any]) -> list[Any]:
    """The answers, unless one of them is an error."""
    for answer in answers:
        if answer.get("error"):
            raise StateFileError(answer["error"])
    return answers
