"""All checks of ``kvcomm doctor``, one after another."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rich.console import Console

from kvcomm_integrations.demo_model import prepare_demo_model
from kvcomm_integrations.doctor import machine
from kvcomm_integrations.doctor.finding import Finding, State, bad, show, skipped
from kvcomm_integrations.errors import KVCommError


def run_doctor(args: argparse.Namespace) -> int:
    """Run ``kvcomm doctor``; returns the exit status."""
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
    yield machine.python()
    yield machine.frameworks()
    torch = machine.torch()
    yield torch
    if torch.state is State.BAD:
        yield skipped("Everything else", "needs PyTorch")
        return
    if (vision := machine.torchvision()) is not None:
        yield vision
    yield machine.device()
    vllm = machine.vllm()
    yield vllm
    try:
        name = model or prepare_demo_model()
    except KVCommError as err:
        yield bad("Model", str(err), "name another one with --model")
        return
    from kvcomm_integrations.doctor.model import attention, tokenizer

    attended = attention(name)
    yield attended
    tokens = tokenizer(name)
    yield from tokens
    if not run:
        yield skipped("Engine", "not started (--no-run)")
    elif State.BAD in {vllm.state, attended.state, tokens[0].state}:
        yield skipped("Engine", "not started: see what is bad above")
    else:
        from kvcomm_integrations.doctor.smoke import smoke

        yield from smoke(name)
