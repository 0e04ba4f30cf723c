"""The demo behind ``kvcomm demo``: agents answer word problems with and without reuse, and a table compares them."""

from __future__ import annotations

import argparse
import json

from kvcomm_integrations.bench.problems import generate_problems, load_questions
from kvcomm_integrations.errors import ConfigurationError, MissingDependencyError

DEFAULT_ROUNDS = 4
DEFAULT_MAX_TOKENS = 128
WARM_UP = 2
"""Questions before the measured ones; they are answered densely and teach the corrections."""


def run_demo(args: argparse.Namespace) -> int:
    """Run the demo as the command line asks for it; returns the exit status.

    Raises:
        ConfigurationError: too few questions, or a file that cannot be written.
        MissingDependencyError: LangGraph is not installed.
    """
    try:
        import langgraph  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "the demo needs LangGraph; install kvcomm-integrations[langgraph,demo,cpu]"
        ) from error
    from kvcomm_integrations.demo.measure import compare
    from kvcomm_integrations.demo.table import as_json, show
    from kvcomm_integrations.demo_model import prepare_demo_model, quiet_engine

    quiet_engine()
    for path in filter(None, (args.json, args.report)):
        if not path.resolve().parent.is_dir():
            raise ConfigurationError(f"cannot write {path}: the folder {path.resolve().parent} does not exist")
    rounds = args.rounds or DEFAULT_ROUNDS
    questions = load_questions(args.questions) if args.questions else _own_questions(rounds + WARM_UP, args.seed)
    if len(questions) < rounds + WARM_UP:
        raise ConfigurationError(
            f"{rounds} rounds need {rounds + WARM_UP} questions ({WARM_UP} to warm up), but there are {len(questions)}"
        )
    comparison = compare(
        model=args.model or prepare_demo_model(),
        warm_up=questions[:WARM_UP],
        questions=questions[WARM_UP : rounds + WARM_UP],
        agents=args.agents,
        max_tokens=args.max_tokens or DEFAULT_MAX_TOKENS,
        seed=args.seed,
    )
    show(comparison)
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(as_json(comparison), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot write {args.json}: {error.strerror}") from error
    if args.report is not None:
        runs = comparison.runs
        written = (runs.to_jsonl if args.report.suffix in (".json", ".jsonl") else runs.to_html)(args.report)
        print(f"{written}: {len(runs)} requests")
    return 0


def _own_questions(count: int, seed: int) -> list[str]:
    """Two word problems in one question, so that there is something to share."""
    problems = generate_problems(2 * count, seed)
    return [f"{a.question} And then: {b.question}" for a, b in zip(problems[::2], problems[1::2], strict=True)]
