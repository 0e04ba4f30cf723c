"""``kvcomm bench`` on the command line: the options of every benchmark, which is imported only when it runs."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

Subcommands = argparse._SubParsersAction

MODEL_HELP = "folder or hub id of the model (default: SmolLM2-135M, prepared on first use)"
KINDS = {
    "micro": "what each step of a reuse costs, against what the machine can do",
    "ttft": "time to each agent's first token, plain vLLM with prefix caching against reuse",
    "serve": "many teams at once: throughput, latency and stalls, plain vLLM against reuse",
    "turns": "conversations of many turns: does an agent's next turn cost more than its last?",
    "tail": "the slowest requests: does anybody wait so that the engine can learn?",
    "gpu": "the papers' set-up and longer contents: first tokens, decoding, harvests; one JSON file to send",
    "overhead": "plain vLLM against the connector where nothing is reused",
    "fidelity": "how far every policy is from dense, on the real engine",
    "planning": "what finding contents and building prompts costs, without an engine",
    "isolation": "can one tenant find out by timing what another has sent?",
}
"""The benchmarks and what they tell."""
COUNTS: dict[str, dict[str, tuple[int, str]]] = {
    "micro": {"repeats": (9, "runs of each step")},
    "ttft": {"agents": (5, "fully connected"), "warmup": (4, "rounds to learn from"), "rounds": (5, "rounds measured"),
             "from-agent": (1, "first agent measured")},
    "serve": {"agents": (5, "of each team"), "prefix": (512, "tokens of a system prompt"),
              "input": (1024, "tokens of the question"), "output": (32, "tokens of an answer"),
              "sessions": (16, "sessions measured"), "warmup": (4, "sessions to learn from")},
    "turns": {"turns": (12, "of each conversation"), "agents": (3, "that take turns, in a chat"),
              "rounds": (5, "rounds measured"), "question": (900, "tokens of the question"),
              "result": (100, "tokens of a tool's result")},
    "tail": {"requests": (300, "of sessions with think times, by way"), "agents": (3, "that take turns"),
             "prefix": (128, "tokens of a system prompt"), "input": (1024, "tokens of the question"),
             "output": (16, "tokens of an answer"), "together": (4, "sessions at once, where there are no pauses"),
             "rounds": (5, "rounds without pauses")},
    "gpu": {"agents": (5, "fully connected"), "prefix": (512, "tokens of a system prompt"),
            "output": (512, "tokens of an answer"), "warmup": (4, "rounds to learn from"),
            "rounds": (5, "rounds measured"), "decode": (128, "tokens decoded by each request that is timed")},
    "overhead": {"prefix": (64, "tokens of the system prompt"), "input": (512, "tokens of the question"),
                 "output": (32, "tokens of an answer"), "rounds": (9, "rounds measured"),
                 "together": (4, "answers at once")},
    "fidelity": {"agents": (4, "fully connected"), "measure": (15, "contents to measure on"),
                 "max-tokens": (48, "length of answers, tokens"), "tokens": (32, "positions compared")},
    "planning": {"contents": (200, "known contents"), "repeats": (20, "prompts per length")},
    "isolation": {"guesses": (15, "contents")},
}  # fmt: skip
"""Options that are whole numbers from 1 on: defaults and meanings."""
PROVING = "let audits below it prove edges, which then repair less (the engine's small_divergence; %(default)s)"
FAST: dict[str, dict[str, Any]] = {
    "micro": {"repeats": 3},
    "ttft": {"agents": 3, "prefix": [128], "input": [256], "output": [64], "warmup": 1, "rounds": 1, "warm_rounds": 0,
             "plain_eager": True},
    "serve": {"agents": 2, "prefix": 128, "input": 128, "output": 8, "warmup": 1, "sessions": 2, "concurrency": [2],
              "plain_eager": True},
    "turns": {"turns": 4, "rounds": 1, "warmup": 1, "question": 160, "result": 40, "answer": 8},
    "gpu": {"agents": 3, "prefix": 128, "contents": [256], "output": 32, "warmup": 1, "rounds": 1, "decode": 8},
    "tail": {"requests": 6, "input": 256, "rounds": 1, "together": 2, "think": 0.3},
    "overhead": {"input": 128, "output": 8, "rounds": 2, "together": 2},
}  # fmt: skip
"""What ``--fast`` sets."""


def add_commands(subcommands: Subcommands[argparse.ArgumentParser]) -> None:
    """Add ``bench`` and its kinds."""
    bench = subcommands.add_parser("bench", help="measure, on this machine")
    kinds = bench.add_subparsers(title="benchmarks", metavar="KIND", required=True)
    own = {
        "ttft": _add_ttft, "serve": _add_serve, "turns": _add_turns, "tail": _add_tail, "gpu": _add_gpu,
        "fidelity": _add_fidelity,
    }  # fmt: skip
    for kind, text in KINDS.items():
        parser = kinds.add_parser(kind, help=text)
        parser.add_argument("--model", help=MODEL_HELP)
        parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
        if kind in FAST:
            parser.add_argument("--fast", action="store_true", help="smaller and fewer runs, to see that it works")
        if kind != "planning":
            parser.add_argument("--seed", type=int, default=0)
        for name, (default, meaning) in COUNTS[kind].items():
            add_count(parser, f"--{name}", f"{meaning} (%(default)s)", default=default)
        if kind in ("micro", "planning"):
            what = "the content" if kind == "micro" else "prompts"
            add_count(parser, "--tokens", f"length of {what}; repeatable", action="append")
        if kind == "micro":
            parser.add_argument(
                "--no-prefill", action="store_true", help="do not compare with a dense prefill of the model"
            )
        if kind in own:
            own[kind](parser)
            parser.add_argument("--dtype", default="auto", help="of weights and cache (%(default)s: vLLM's choice)")
            if kind in ("ttft", "serve"):
                _add_baseline(parser)
            parser.add_argument("--small-divergence", type=float, default=0.0, metavar="NATS", help=PROVING)
        parser.set_defaults(command=lambda args, kind=kind: _run(kind, args))


def at_least_one(text: str) -> int:
    """A whole number from 1 on.

    Raises:
        argparse.ArgumentTypeError: it is less.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def add_count(parser: argparse.ArgumentParser, flag: str, text: str, **more: Any) -> None:
    """Add an option that takes a whole number from 1 on."""
    parser.add_argument(flag, type=at_least_one, metavar="N", help=text, **more)


def _run(kind: str, args: argparse.Namespace) -> int:
    from kvcomm_integrations.demo_model import prepare_demo_model, quiet_engine

    quiet_engine()
    args.model = args.model or prepare_demo_model()
    if kind in FAST and args.fast:
        vars(args).update(FAST[kind])
    module = "hf_fidelity" if getattr(args, "hf", False) else "plan_cost" if kind == "planning" else kind
    module = "turns_fidelity" if getattr(args, "fidelity", False) else module
    run: Any = getattr(import_module(f"kvcomm_integrations.bench.{module}"), f"run_{module}")
    return int(run(args))


def _add_ttft(parser: argparse.ArgumentParser) -> None:
    lengths = {"prefix": (512, "an agent's system prompt"), "input": (1024, "the question"),
               "output": (512, "an answer, forced to this length")}  # fmt: skip
    for name, (default, what) in lengths.items():
        text = f"tokens of {what} ({default}); with several, every combination is measured"
        add_count(parser, f"--{name}", text, nargs="+", default=[default])
    parser.add_argument("--policies", default="ridge", metavar="A,B", help="ways of reuse (%(default)s)")
    parser.add_argument("--warm-rounds", type=int, default=1, metavar="N", help="timed but not counted (%(default)s)")
    parser.add_argument("--repair-depth", type=int, metavar="N", help="most tokens repaired per content (engine's own)")
    parser.add_argument("--synthetic", metavar="LxH", help="a random model of L layers and hidden size H, as in 60x256")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw times and ratios by agent")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graph", default="full", help="who hears whom: full, chain or star (%(default)s)")
    add_count(parser, "--concurrency", "sessions at once (1 8)", nargs="+", default=[1, 8])
    parser.add_argument("--rate", type=float, metavar="R", help="sessions that arrive per second, by chance")


def _add_turns(parser: argparse.ArgumentParser) -> None:
    kinds = {"scenario": ("loop", "chat"), "client": ("langchain", "autogen")}
    meanings = {"scenario": "a worker that calls tools, or agents that take turns", "client": "whose messages they are"}
    for name, choices in kinds.items():
        parser.add_argument(f"--{name}", choices=choices, default=choices[0], help=f"{meanings[name]} (%(default)s)")
    parser.add_argument("--warmup", type=int, default=4, metavar="N", help="conversations to learn from (%(default)s)")
    add_count(parser, "--answer", "tokens of an answer (loop 24, chat 96)")
    add_count(parser, "--block-size", "tokens of a block of the paged cache (vLLM's choice)")
    parser.add_argument("--fidelity", action="store_true", help="compare with dense runs of the same messages, by turn")
    parser.add_argument("--policy", help="correction policy (the engine's: ridge)")
    parser.add_argument("--no-carry", action="store_true", help="load an agent's past again instead of taking it over")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw times by turn")


def _add_tail(parser: argparse.ArgumentParser) -> None:
    text = "mean time between two calls of a session, seconds (%(default)s)"
    parser.add_argument("--think", type=float, default=1.0, metavar="S", help=text)


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    text = "lengths of the question, tokens; what the model has no room for is left out (1024,8192,32768)"
    parser.add_argument("--contents", type=_lengths, default=[1024, 8192, 32768], metavar="N,N", help=text)
    parser.add_argument("--policies", default="ridge", metavar="A,B", help="ways of reuse (%(default)s)")
    parser.set_defaults(json=Path("kvcomm-gpu.json"), warm_rounds=1)


def _lengths(text: str) -> list[int]:
    return [at_least_one(part) for part in text.split(",")]


def _add_baseline(parser: argparse.ArgumentParser) -> None:
    text = "what is dense: plain vLLM in a process of its own with its own defaults, or the same engine (%(default)s)"
    parser.add_argument("--baseline", choices=("plain", "engine"), default="plain", help=text)
    eager = "plain vLLM does not compile the model (on a CPU it does by default, which takes minutes at the start)"
    parser.add_argument("--plain-eager", action="store_true", help=eager)


def _add_fidelity(parser: argparse.ArgumentParser) -> None:
    contents, gates = ("problems", "documents"), ("maturity", "entropy")
    hf = "on Hugging Face transformers instead, with errors of keys and values by layer"
    policies = "policies to compare, with options if any: kvcmas,kvcmas:rank=4 (default: all)"
    parser.add_argument("--hf", action="store_true", help=hf)
    parser.add_argument("--questions", type=Path, metavar="FILE", help='JSONL with {"question": ...}, such as GSM8K')
    parser.add_argument("--contents", choices=contents, default="problems", help="what agents share")
    parser.add_argument("--measure-contents", choices=contents, help="what they share while measured, if different")
    parser.add_argument("--warmup", type=int, default=16, metavar="N", help="contents to learn from")
    parser.add_argument("--policies", metavar="A,B", help=policies)
    parser.add_argument("--gate", choices=gates, default="maturity", help="entropy: as in the papers (%(default)s)")
    parser.add_argument("--timed", type=int, default=3, metavar="N", help="contents to time each policy on")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw divergence against repaired share")
