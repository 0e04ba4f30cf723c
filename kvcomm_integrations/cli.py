"""The ``kvcomm`` command. Each subcommand imports what it needs only when it runs, so ``--help`` is immediate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from kvcomm_integrations._version import __version__
from kvcomm_integrations.bench.speed_options import add_small_divergence, add_speed_benchmarks
from kvcomm_integrations.doctor.diagnose import add_commands as add_doctor
from kvcomm_integrations.errors import KVCommError
from kvcomm_integrations.report.commands import add_commands as add_report_commands

EXIT_ERROR = 2
"""Exit status for an error of ours, as for wrong usage."""
EXIT_INTERRUPTED = 130

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvcomm`` with ``argv`` (default: the process's own) and return the exit status."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if hasattr(args, "vllm_options"):
        args.vllm_options = rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    command: Command = args.command
    try:
        return command(args)
    except KVCommError as err:
        print(f"kvcomm: {err}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("kvcomm: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcomm", description="Agents that share one local model stop paying for the same text twice."
    )
    parser.add_argument("--version", action="version", version=f"kvcomm {__version__}")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(subcommands)
    _add_serve(subcommands)
    _add_explain(subcommands)
    _add_model(subcommands)
    add_report_commands(subcommands)
    add_doctor(subcommands)
    _add_bench(subcommands)
    _add_state(subcommands)
    return parser


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


# --- kvcomm demo -----------------------------------------------------------------------------------------------------


def _add_demo(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "demo", help="several agents answer questions, with and without reuse, side by side"
    )
    parser.add_argument("--model", help="folder or hub id of the model (default: SmolLM2-135M, prepared on first use)")
    parser.add_argument(
        "--questions", type=Path, metavar="FILE", help='your own questions, one {"question": ...} a line'
    )
    parser.add_argument("--agents", type=_at_least_one, default=4, metavar="N", help="agents (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=_at_least_one, default=None, metavar="N", help="questions asked one after another"
    )
    parser.add_argument("--max-tokens", type=_at_least_one, default=None, metavar="N", help="longest answer, tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every measurement to FILE")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="also write a page on the run (FILE.jsonl: its requests, as JSON lines)",
    )
    parser.add_argument("--seed", type=int, default=0, help="for questions and sampling (default: %(default)s)")
    parser.set_defaults(command=_demo)


def _demo(args: argparse.Namespace) -> int:
    run_demo: Command = import_module("kvcomm_integrations.demo").run_demo
    return run_demo(args) or 0


# --- kvcomm serve ----------------------------------------------------------------------------------------------------


def _add_serve(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "serve",
        help="vLLM's OpenAI-compatible server with KV reuse",
        usage="kvcomm serve MODEL [options] [any option of vLLM's server]",
        description="Starts vLLM's OpenAI-compatible server with the kvcomm connector. Options that are not listed "
        "here are vLLM's own: --port, --max-model-len, --tensor-parallel-size, --api-key and so on.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub id")
    parser.add_argument("--reuse", default="{}", metavar="JSON", help='reuse settings, such as \'{"policy": "ridge"}\'')
    parser.add_argument(
        "--tenant-keys", type=Path, metavar="FILE", help='who is who by API key: {"<key>": "<tenant>", ...}'
    )
    parser.add_argument(
        "--tenant-header", default="", metavar="NAME", help="header in which a trusted proxy names the tenant"
    )
    parser.add_argument(
        "--live", action="store_true", help="show the latest requests at /kvcomm, to this machine (kvcomm top reads it)"
    )
    parser.add_argument("--allow-dense", action="store_true", help="also serve models whose KV cannot be reused")
    parser.add_argument(
        "--start-timeout", type=float, default=3600, metavar="S", help="longest start, seconds (default: %(default)s)"
    )
    parser.add_argument("--verbose", action="store_true", help="show vLLM's log from the beginning")
    parser.set_defaults(command=_serve, vllm_options=[])


def _serve(args: argparse.Namespace) -> int:
    run_serve: Command = import_module("kvcomm_integrations.serve.launch").run_serve
    return run_serve(args)


# --- kvcomm bench ----------------------------------------------------------------------------------------------------


def _add_bench(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = subcommands.add_parser("bench", help="measure, on this machine")
    kinds = bench.add_subparsers(title="benchmarks", metavar="KIND", required=True)
    add_speed_benchmarks(kinds, _prepared_model)
    parser = kinds.add_parser("fidelity", help="how far every policy is from dense, on the real engine")
    parser.add_argument("--model", help="folder or hub id of the model (default: SmolLM2-135M, prepared on first use)")
    parser.add_argument(
        "--hf",
        action="store_true",
        help="on Hugging Face transformers instead, with errors of keys and values by layer",
    )
    parser.add_argument("--questions", type=Path, metavar="FILE", help='JSONL with {"question": ...}, such as GSM8K')
    parser.add_argument("--contents", choices=("problems", "documents"), default="problems", help="what agents share")
    parser.add_argument(
        "--measure-contents", choices=("problems", "documents"), help="what they share while measured, if different"
    )
    parser.add_argument("--agents", type=_at_least_one, default=4, metavar="N")
    parser.add_argument("--warmup", type=int, default=16, metavar="N", help="contents to learn from")
    parser.add_argument("--measure", type=_at_least_one, default=15, metavar="N", help="contents to measure on")
    parser.add_argument(
        "--policies",
        metavar="A,B",
        help="policies to compare, with options if any: kvcmas,kvcmas:rank=4 (default: all)",
    )
    parser.add_argument(
        "--gate", choices=("maturity", "entropy"), default="maturity", help="entropy: as in the papers (%(default)s)"
    )
    add_small_divergence(parser)
    parser.add_argument("--max-tokens", type=_at_least_one, default=48, metavar="N", help="length of answers, tokens")
    parser.add_argument("--tokens", type=_at_least_one, default=32, metavar="N", help="positions compared")
    parser.add_argument("--timed", type=int, default=3, metavar="N", help="contents to time each policy on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw divergence against repaired share")
    parser.set_defaults(command=_bench_fidelity)
    parser = kinds.add_parser("planning", help="what finding contents and building prompts costs, without an engine")
    parser.add_argument("--model", help="folder or hub id of the model (default: SmolLM2-135M, prepared on first use)")
    parser.add_argument(
        "--tokens", type=_at_least_one, action="append", metavar="N", help="length of prompts; repeatable"
    )
    parser.add_argument("--contents", type=_at_least_one, default=200, metavar="N", help="known contents (%(default)s)")
    parser.add_argument(
        "--repeats", type=_at_least_one, default=20, metavar="N", help="prompts per length (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    parser.set_defaults(command=_bench_planning)
    parser = kinds.add_parser("isolation", help="can one tenant find out by timing what another has sent?")
    parser.add_argument("--model", help="folder or hub id of the model (default: SmolLM2-135M, prepared on first use)")
    parser.add_argument("--guesses", type=_at_least_one, default=15, metavar="N", help="contents (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    parser.set_defaults(command=_bench_isolation)


def _bench_isolation(args: argparse.Namespace) -> int:
    from kvcomm_integrations.demo import prepare_environment

    args.model = args.model or prepare_environment()
    run: Command = import_module("kvcomm_integrations.bench.isolation").run_isolation
    return run(args)


def _prepared_model() -> str:
    from kvcomm_integrations.demo import prepare_environment

    return prepare_environment()


def _bench_fidelity(args: argparse.Namespace) -> int:
    if args.hf:
        args.model = args.model or _demo_model()
        run_hf: Command = import_module("kvcomm_integrations.bench.hf_fidelity").run_hf_fidelity
        return run_hf(args)
    from kvcomm_integrations.demo import prepare_environment

    args.model = args.model or prepare_environment()
    run: Command = import_module("kvcomm_integrations.bench.fidelity").run_fidelity
    return run(args)


def _demo_model() -> str:
    from kvcomm_integrations.demo_model import ensure_demo_model

    return str(ensure_demo_model(progress=sys.stderr.isatty()))


def _bench_planning(args: argparse.Namespace) -> int:
    run: Command = import_module("kvcomm_integrations.bench.plan_cost").run_planning
    return run(args)


# --- kvcomm explain --------------------------------------------------------------------------------------------------


def _add_explain(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "explain",
        help="show a prompt's segments, and what is loaded, repaired or computed of each",
        description='A file of messages is a JSON list, or {"messages": [...], "agent": ..., "tools": [...], '
        '"answer": ...}; messages in OpenAI\'s form or as LangChain dumps them.',
    )
    parser.add_argument("messages", nargs="?", type=Path, metavar="MESSAGES.json", help="the prompt to explain")
    parser.add_argument("--model", help="folder or hub id of the model (default: SmolLM2-135M, prepared on first use)")
    parser.add_argument("--agent", help="whose prompt it is (default: as the file says, else the file's name)")
    parser.add_argument(
        "--seen", type=Path, action="append", default=[], metavar="FILE", help="a prompt that ran before; repeatable"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="show a finished run's report, not a forecast")
    parser.add_argument(
        "--block-size", type=_at_least_one, default=16, metavar="N", help="prefix cache's block, tokens (%(default)s)"
    )
    parser.set_defaults(command=_explain)


def _explain(args: argparse.Namespace) -> int:
    if args.messages is not None and args.model is None:
        args.model = _demo_model()
    run_explain: Command = import_module("kvcomm_integrations.report.explain").run_explain
    return run_explain(args)


# --- kvcomm model ----------------------------------------------------------------------------------------------------


def _add_model(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser("model", help="print the folder of the demo model, preparing it if need be")
    parser.add_argument("--tiny", action="store_true", help="the tiny random model that tests use, instead")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where models are kept (default: $KVCOMM_CACHE)")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare checksums")
    parser.set_defaults(command=_model)


def _model(args: argparse.Namespace) -> int:
    from kvcomm_integrations.demo_model import DemoModelError, ensure_demo_model, ensure_tiny_model, is_complete

    folder = (ensure_tiny_model if args.tiny else ensure_demo_model)(args.cache, progress=sys.stderr.isatty())
    if args.verify and not is_complete(folder, deep=True):
        raise DemoModelError(f"{folder} is damaged: delete it and run this command again")
    print(folder)
    return 0


# --- kvcomm state ----------------------------------------------------------------------------------------------------


def _add_state(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    state = subcommands.add_parser("state", help="learned corrections: save, load, merge, show and clear them")
    kinds = state.add_subparsers(title="actions", metavar="ACTION", required=True)
    parser = kinds.add_parser("show", help="check files and print what they hold")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print the manifests as JSON")
    parser.set_defaults(command=_state("state.file_commands", "show"))
    parser = kinds.add_parser("merge", help="one file that knows what several replicas have learned")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="the file to write")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="files to merge; each example once")
    parser.add_argument("--force", action="store_true", help="replace OUTPUT if it exists")
    parser.set_defaults(command=_state("state.file_commands", "merge"))
    for action, text in {
        "save": "have a running server write what it has learned",
        "load": "have a running server learn what a file holds",
        "clear": "have a running server forget what it has learned",
    }.items():
        parser = kinds.add_parser(action, help=text, description=f"{text}; KVCOMM_ADMIN_KEY holds its operator's key")
        if action != "clear":
            parser.add_argument("name", metavar="NAME", help="file in the server's folder (its KVCOMM_STATE_DIR)")
        parser.add_argument("--server", required=True, metavar="URL", help="address of the server")
        parser.add_argument("--tenant", help="only this tenant's corrections")
        if action == "load":
            parser.add_argument("--merge", action="store_true", help="in addition to what the server knows")
        parser.set_defaults(command=_state("serve.state_client", action))


def _state(module: str, action: str) -> Command:
    def run(args: argparse.Namespace) -> int:
        command: Command = getattr(import_module(f"kvcomm_integrations.{module}"), action)
        return command(args)

    return run


if __name__ == "__main__":
    sys.exit(main())
