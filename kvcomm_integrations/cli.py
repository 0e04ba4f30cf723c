"""The ``kvcomm`` command. Each subcommand imports what it needs only when it runs, so ``--help`` is immediate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from kvcomm_integrations._version import __version__
from kvcomm_integrations.bench.command_line import MODEL_HELP, add_count
from kvcomm_integrations.bench.command_line import add_commands as add_bench
from kvcomm_integrations.errors import KVCommError
from kvcomm_integrations.report.commands import add_commands as add_report_commands

EXIT_ERROR = 2
"""Exit status for an error of ours, as for wrong usage."""
EXIT_INTERRUPTED = 130

Command = Callable[[argparse.Namespace], int]
Subcommands = argparse._SubParsersAction


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
        return command(args) or 0
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
    _add_doctor(subcommands)
    add_bench(subcommands)
    _add_state(subcommands)
    return parser


def _run(where: str) -> Command:
    """A command that imports its function, ``module:function`` within this package, when it runs."""
    module, _, function = where.partition(":")

    def run(args: argparse.Namespace) -> int:
        command: Command = getattr(import_module(f"kvcomm_integrations.{module}"), function)
        return command(args)

    return run


def _add_demo(subcommands: Subcommands[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "demo", help="several agents answer questions, with and without reuse, side by side"
    )
    parser.add_argument("--model", help=MODEL_HELP)
    parser.add_argument(
        "--questions", type=Path, metavar="FILE", help='your own questions, one {"question": ...} a line'
    )
    add_count(parser, "--agents", "agents (default: %(default)s)", default=4)
    add_count(parser, "--rounds", "questions asked one after another")
    add_count(parser, "--max-tokens", "longest answer, tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every measurement to FILE")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="also write a page on the run (FILE.jsonl: its requests, as JSON lines)",
    )
    parser.add_argument("--seed", type=int, default=0, help="for questions and sampling (default: %(default)s)")
    parser.set_defaults(command=_run("demo:run_demo"))


def _add_serve(subcommands: Subcommands[argparse.ArgumentParser]) -> None:
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
    parser.set_defaults(command=_run("serve.launch:run_serve"), vllm_options=[])


def _add_explain(subcommands: Subcommands[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "explain",
        help="show a prompt's segments, and what is loaded, repaired or computed of each",
        description='A file of messages is a JSON list, or {"messages": [...], "agent": ..., "tools": [...], '
        '"answer": ...}; messages in OpenAI\'s form or as LangChain dumps them.',
    )
    parser.add_argument("messages", nargs="?", type=Path, metavar="MESSAGES.json", help="the prompt to explain")
    parser.add_argument("--model", help=MODEL_HELP)
    parser.add_argument("--agent", help="whose prompt it is (default: as the file says, else the file's name)")
    parser.add_argument(
        "--seen", type=Path, action="append", default=[], metavar="FILE", help="a prompt that ran before; repeatable"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="show a finished run's report, not a forecast")
    add_count(parser, "--block-size", "prefix cache's block, tokens (%(default)s)", default=16)
    parser.set_defaults(command=_explain)


def _explain(args: argparse.Namespace) -> int:
    from kvcomm_integrations.demo_model import prepare_demo_model

    if args.messages is not None and args.model is None:
        args.model = prepare_demo_model()
    return _run("report.explain:run_explain")(args)


def _add_model(subcommands: Subcommands[argparse.ArgumentParser]) -> None:
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


def _add_doctor(subcommands: Subcommands[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "doctor", help="check this machine and a model, say what is wrong and what to do; status 1 if something is"
    )
    parser.add_argument("--model", help=MODEL_HELP)
    parser.add_argument("--no-run", action="store_true", help="start no engine")
    parser.add_argument("--smoke", action="store_true", help="check results and measure times, in one table")
    parser.add_argument("--fast", action="store_true", help="with --smoke: a shorter content, once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was found to FILE")
    engine = parser.add_argument_group("engine", "with --smoke: how you would start it; vLLM decides what is left out")
    engine.add_argument("--dtype", default="auto", help="of weights and cache (%(default)s: vLLM's choice)")
    engine.add_argument("--max-model-len", type=int, metavar="TOKENS", help="longest prompt and answer")
    engine.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, help="no compilation, no graphs")
    parser.set_defaults(command=_run("doctor.diagnose:run_doctor"))


def _add_state(subcommands: Subcommands[argparse.ArgumentParser]) -> None:
    state = subcommands.add_parser("state", help="learned corrections: save, load, merge, show and clear them")
    kinds = state.add_subparsers(title="actions", metavar="ACTION", required=True)
    parser = kinds.add_parser("show", help="check files and print what they hold")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print the manifests as JSON")
    parser.set_defaults(command=_run("state.file_commands:show"))
    parser = kinds.add_parser("merge", help="one file that knows what several replicas have learned")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="the file to write")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="files to merge; each example once")
    parser.add_argument("--force", action="store_true", help="replace OUTPUT if it exists")
    parser.set_defaults(command=_run("state.file_commands:merge"))
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
        parser.set_defaults(command=_run("serve.state_client:run_order"), action=action)


if __name__ == "__main__":
    sys.exit(main())
