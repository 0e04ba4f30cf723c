"""``kvcomm report`` and ``kvcomm top`` on the command line. Imports what they need only when they run."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_commands(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both subcommands."""
    parser = subcommands.add_parser(
        "report",
        help="make a page of a recorded run: timelines, prompt maps, the graph of agents, savings, audits",
        description="RUNS are JSON lines as model.report().to_jsonl(...) and `kvcomm demo --report run.jsonl` write.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUNS", help="recorded requests, JSON lines")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="%(default)s")
    parser.set_defaults(command=_report)
    parser = subcommands.add_parser("top", help="watch a running engine's requests in the terminal")
    parser.add_argument("url", metavar="URL", help="address of its live page, such as http://127.0.0.1:8765/kvcomm")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (%(default)s)")
    parser.add_argument("--once", action="store_true", help="print one look and end")
    parser.set_defaults(command=_top)


def _report(args: argparse.Namespace) -> int:
    from kvcomm_integrations.report.run_report import read_runs

    report = read_runs(args.runs)
    print(f"{report.to_html(args.output)}: {len(report)} requests")
    return 0


def _top(args: argparse.Namespace) -> int:
    from kvcomm_integrations.report.top import run_top

    return run_top(args.url, interval=max(0.1, args.interval), once=args.once)
