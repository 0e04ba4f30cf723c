"""``kvcomm doctor`` on the command line. Imports what it needs only when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcomm_integrations.doctor.finding import Finding


def add_commands(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser(
        "doctor", help="check this machine and a model, say what is wrong and what to do; status 1 if something is"
    )
    parser.add_argument("--model", help="folder or hub id of the model (default: SmolLM2-135M, prepared on first use)")
    parser.add_argument("--no-run", action="store_true", help="start no engine")
    parser.set_defaults(command=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from rich.console import Console

    from kvcomm_integrations.doctor.finding import show

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=1000)
    return show(examine(args.model, run=not args.no_run), console)


def examine(model: str | None, *, run: bool) -> Iterator[Finding]:
    """All findings, one after another; later checks are skipped where earlier ones say that they cannot work.

    Args:
        model: folder or hub id; ``None`` is the demo model.
        run: start an engine too.
    """
    from kvcomm_integrations.demo import prepare_environment
    from kvcomm_integrations.doctor import machine
    from kvcomm_integrations.doctor.finding import Finding, State
    from kvcomm_integrations.errors import KVCommError

    yield machine.python()
    yield machine.frameworks()
    torch = machine.torch()
    yield torch
    if torch.state is State.BAD:
        yield Finding("Everything else", State.SKIPPED, "needs PyTorch")
        return
    if (vision := machine.torchvision()) is not None:
        yield vision
    yield machine.device()
    vllm = machine.vllm()
    yield vllm
    try:
        name = model or prepare_environment()
    except KVCommError as err:
        yield Finding("Model", State.BAD, str(err), "name another one with --model")
        return
    from kvcomm_integrations.doctor.model import attention, tokenizer

    attended = attention(name)
    yield attended
    tokens = tokenizer(name)
    yield from tokens
    if not run:
        yield Finding("Engine", State.SKIPPED, "not started (--no-run)")
    elif State.BAD in {vllm.state, attended.state, tokens[0].state}:
        yield Finding("Engine", State.SKIPPED, "not started: see what is bad above")
    else:
        from kvcomm_integrations.doctor.smoke import smoke

        yield from smoke(name)
