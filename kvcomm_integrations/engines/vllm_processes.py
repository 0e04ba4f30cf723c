"""vLLM's subprocesses: who may start them and who may not, and a sign of life while they start."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import weakref
from collections.abc import Iterator

from kvcomm_integrations.errors import EngineError, EngineForkedError

_started_in: int | None = None
"""Process in which vLLM has been started; in processes forked from it vLLM cannot be started again."""


def refuse_in_forked_child(model: str) -> None:
    """Raise in a process that was forked after vLLM had been started.

    Raises:
        EngineForkedError: this is such a process.
    """
    if _started_in not in (None, os.getpid()):
        raise EngineForkedError(
            f"the engine for {model!r} cannot be used in process {os.getpid()}, which was forked from process "
            f"{_started_in} after vLLM had been started there. Let several processes share a served engine "
            f"(kvcomm serve {model}, then base_url=...), fork before the first call, or start the process with "
            'multiprocessing.get_context("spawn")'
        )


def claim_process() -> None:
    """Note that vLLM is started in this process.

    Raises:
        EngineError: this process is one of vLLM's own, which is importing the main script.
    """
    global _started_in
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        main = getattr(sys.modules.get("__main__"), "__file__", "your script")
        raise EngineError(
            f"vLLM starts subprocesses that import {main} again: put the code that calls the model under "
            'if __name__ == "__main__":'
        )
    _started_in = os.getpid()


@contextlib.contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def disown_processes() -> None:
    """Take the parent's processes away from a forked child's exit handlers, which would end them.

    vLLM 0.32 and 0.33 shut their subprocesses down in ``weakref.finalize`` objects, and ``multiprocessing`` of CPython
    3.11 to 3.13 joins its children at exit; neither looks whether it runs in the process that has started them. Not in
    ``connector.workarounds``, because that imports torch, and this runs before ``fork`` returns.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = finalizer.peek()
        if alive is not None and str(getattr(alive[1], "__module__", "")).startswith("vllm."):
            finalizer.detach()
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]


@contextlib.contextmanager
def start_progress(model: str) -> Iterator[None]:
    """A spinner on standard error while the block runs; none where that is no terminal or ``KVCOMM_PROGRESS`` is 0."""
    from rich.console import Console

    console = Console(stderr=True)
    shown = console.is_terminal and os.environ.get("KVCOMM_PROGRESS", "1") != "0"
    text = f"Starting vLLM with {model} (about half a minute on a CPU) ..."
    with console.status(text) if shown else contextlib.nullcontext():
        yield
