"""All checks of ``kvcomm doctor``, one after another."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from kvcomm_integrations.demo_model import prepare_demo_model
from kvcomm_integrations.doctor import machine
from kvcomm_integrations.doctor.finding import Finding, Measured, State, bad, show, skipped
from kvcomm_integrations.errors import KVCommError

if TYPE_CHECKING:
    from kvcomm_integrations.doctor.measurements import SelfTest


def run_doctor(args: argparse.Namespace) -> int:
    """Run ``kvcomm doctor``; returns the exit status."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=1000)
    test = _self_test(args) if args.smoke else None
    seen: list[Finding] = []
    status = show(_noted(examine(args.model, run=not args.no_run, test=test), seen), console)
    if args.json is not None:
        from kvcomm_integrations.bench.harness import save_json

        save_json(args, {"findings": [asdict(finding) for finding in seen], "figures": test and test.figures})
    if test is not None:
        console.print(overall(seen, str(args.json or "")), markup=False)
    return status


def _noted(findings: Iterable[Finding], seen: list[Finding]) -> Iterator[Finding]:
    for finding in findings:
        seen.append(finding)
        yield finding


def _self_test(args: argparse.Namespace) -> SelfTest | None:
    """What ``--smoke`` is to measure; ``None`` where there is nothing to measure with, which the findings say."""
    try:
        import torch

        from kvcomm_integrations.doctor.measurements import SelfTest
    except ImportError:
        return None
    settings = {"dtype": args.dtype, "enforce_eager": args.enforce_eager, "max_model_len": args.max_model_len}
    if args.fast:
        return SelfTest(settings, content=256, rounds=1)
    return SelfTest(settings, content=4096 if torch.cuda.is_available() else 1024)


def overall(findings: Iterable[Finding], file: str) -> str:
    """The last line: all in all, and what to send us if something is not good.

    What is weak counts only where it was measured: a machine without a GPU, say, is no fault.

    Args:
        findings: all of them.
        file: where they have been written; empty if nowhere.
    """
    states = [f.state for f in findings if f.state is State.BAD or isinstance(f, Measured)]
    wrong = ", ".join(f"{states.count(state)} {state}" for state in (State.BAD, State.WEAK) if state in states)
    if not wrong:
        return "Overall: good"
    send = f"send us {file}" if file else "run this again with --json FILE, and send us that file"
    return f"Overall: {wrong}. If a remedy does not help, {send} (docs/gpu.md says what is in it)."


def examine(model: str | None, *, run: bool, test: SelfTest | None = None) -> Iterator[Finding]:
    """All findings, one after another; later checks are skipped where earlier ones say that they cannot work.

    Args:
        model: folder or hub id; ``None`` is the demo model.
        run: start an engine too.
        test: what is to be measured with it, if anything.
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

        yield from smoke(name, test)
