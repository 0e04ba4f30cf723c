"""Shows on the terminal that an engine is starting. Silent where there is no terminal or ``KVCOMM_PROGRESS=0``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def engine_start_progress(model: str) -> Iterator[None]:
    """A spinner on standard error while the block runs."""
    if os.environ.get("KVCOMM_PROGRESS", "1") == "0":
        yield
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"Starting vLLM with {model} (about half a minute on a CPU) ..."):
        yield
