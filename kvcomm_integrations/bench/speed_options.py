"""Command-line options of the benchmarks of speed. Imports nothing heavy, so that ``kvcomm --help`` is immediate."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

Kinds: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Prepare = Callable[[], str]


def add_speed_benchmarks(kinds: Kinds, prepare: Prepare) -> None:
    """Add ``micro``, ``ttft``, ``serve`` and ``overhead`` to ``kvcomm bench``.

    Args:
        kinds: where to add them.
        prepare: quietens the engine and returns the model's folder where none is named.
    """
    _add_micro(kinds, prepare)
    _add_ttft(kinds, prepare)
    _add_serve(kinds, prepare)
    _add_overhead(kinds, prepare)


def at_least_one(text: str) -> int:
    """A whole number from 1 on.

    Raises:
        argparse.ArgumentTypeError: it is less.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _common(parser: argparse.ArgumentParser, prepare: Prepare, module: str, function: str, **small: Any) -> None:
    """Options that all have. ``small`` are the values that ``--fast`` sets."""
    parser.add_argument("--model", help="folder or hub id of the model (default: SmolLM2-135M, prepared on first use)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    parser.add_argument("--fast", action="store_true", help="smaller and fewer runs, to see that it works")
    parser.add_argument("--seed", type=int, default=0)

    def run(args: argparse.Namespace) -> int:
        args.model = args.model or prepare()
        if args.fast:
            vars(args).update(args.small)
        command: Any = getattr(import_module(f"kvcomm_integrations.bench.{module}"), function)
        return int(command(args))

    parser.set_defaults(command=run, small=small)


def _add_micro(kinds: Kinds, prepare: Prepare) -> None:
    parser = kinds.add_parser("micro", help="what each step of a reuse costs, against what the machine can do")
    _common(parser, prepare, "micro", "run_micro", repeats=3)
    parser.add_argument(
        "--tokens", type=at_least_one, action="append", metavar="N", help="length of the content; repeatable"
    )
    parser.add_argument("--repeats", type=at_least_one, default=9, metavar="N", help="runs of each step (%(default)s)")
    parser.add_argument("--no-prefill", action="store_true", help="do not compare with a dense prefill of the model")


def _add_ttft(kinds: Kinds, prepare: Prepare) -> None:
    parser = kinds.add_parser("ttft", help="time to each agent's first token, dense with prefix caching against reuse")
    small = {"agents": 3, "prefix": [128], "input": [256], "output": [64], "warmup": 1, "rounds": 1, "warm_rounds": 0}
    _common(parser, prepare, "ttft", "run_ttft", **small)
    parser.add_argument("--agents", type=at_least_one, default=5, metavar="N", help="fully connected (%(default)s)")
    for name, default, what in (
        ("prefix", 512, "an agent's system prompt"),
        ("input", 1024, "the question"),
        ("output", 512, "an answer, forced to this length"),
    ):
        parser.add_argument(
            f"--{name}", type=at_least_one, nargs="+", default=[default], metavar="N",
            help=f"tokens of {what} ({default}); with several, every combination is measured",
        )  # fmt: skip
    parser.add_argument("--policies", default="ridge", metavar="A,B", help="ways of reuse (%(default)s)")
    parser.add_argument(
        "--warmup", type=at_least_one, default=4, metavar="N", help="rounds to learn from (%(default)s)"
    )
    parser.add_argument("--rounds", type=at_least_one, default=5, metavar="N", help="rounds measured (%(default)s)")
    parser.add_argument("--warm-rounds", type=int, default=1, metavar="N", help="timed but not counted (%(default)s)")
    parser.add_argument("--repair-depth", type=int, metavar="N", help="most tokens repaired per content (engine's own)")
    parser.add_argument(
        "--from-agent", type=at_least_one, default=1, metavar="N", help="first agent measured (%(default)s)"
    )
    add_small_divergence(parser)
    parser.add_argument("--synthetic", metavar="LxH", help="a random model of L layers and hidden size H, as in 60x256")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw times and ratios by agent")


def add_small_divergence(parser: argparse.ArgumentParser) -> None:
    """The option that lets audits prove edges."""
    parser.add_argument(
        "--small-divergence", type=float, default=0.0, metavar="NATS",
        help="let audits below it prove edges, which then repair less (the engine's small_divergence; %(default)s)",
    )  # fmt: skip


def _add_serve(kinds: Kinds, prepare: Prepare) -> None:
    parser = kinds.add_parser("serve", help="many teams at once: throughput, latency and stalls, dense against reuse")
    small = {"agents": 2, "prefix": 128, "input": 128, "output": 8, "warmup": 1, "sessions": 2, "concurrency": [2]}
    _common(parser, prepare, "serve", "run_serve", **small)
    parser.add_argument("--agents", type=at_least_one, default=5, metavar="N", help="of each team (%(default)s)")
    parser.add_argument("--graph", default="full", help="who hears whom: full, chain or star (%(default)s)")
    parser.add_argument(
        "--prefix", type=at_least_one, default=512, metavar="N", help="tokens of a system prompt (%(default)s)"
    )
    parser.add_argument(
        "--input", type=at_least_one, default=1024, metavar="N", help="tokens of the question (%(default)s)"
    )
    parser.add_argument(
        "--output", type=at_least_one, default=32, metavar="N", help="tokens of an answer (%(default)s)"
    )
    parser.add_argument(
        "--concurrency", type=at_least_one, nargs="+", default=[1, 8], metavar="N", help="sessions at once (1 8)"
    )
    parser.add_argument(
        "--sessions", type=at_least_one, default=16, metavar="N", help="sessions measured (%(default)s)"
    )
    parser.add_argument("--rate", type=float, metavar="R", help="sessions that arrive per second, by chance")
    parser.add_argument(
        "--warmup", type=at_least_one, default=4, metavar="N", help="sessions to learn from (%(default)s)"
    )
    add_small_divergence(parser)


def _add_overhead(kinds: Kinds, prepare: Prepare) -> None:
    parser = kinds.add_parser("overhead", help="plain vLLM against the connector where nothing is reused")
    _common(parser, prepare, "overhead", "run_overhead", input=128, output=8, rounds=2, together=2)
    parser.add_argument("--prefix", type=at_least_one, default=64, metavar="N", help="tokens of the system prompt")
    parser.add_argument("--input", type=at_least_one, default=512, metavar="N", help="tokens of the question")
    parser.add_argument(
        "--output", type=at_least_one, default=32, metavar="N", help="tokens of an answer (%(default)s)"
    )
    parser.add_argument("--rounds", type=at_least_one, default=9, metavar="N", help="rounds measured (%(default)s)")
    parser.add_argument("--together", type=at_least_one, default=4, metavar="N", help="answers at once (%(default)s)")
