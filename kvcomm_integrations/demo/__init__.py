"""The demo behind ``kvcomm demo``: agents answer word problems with and without reuse, and a table compares them."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from kvcomm_integrations.bench.problems import generate_problems, load_questions
from kvcomm_integrations.demo.measure import Comparison, compare
from kvcomm_integrations.demo.table import as_json, show
from kvcomm_integrations.errors import ConfigurationError, MissingDependencyError

DEFAULT_ROUNDS = 5
DEFAULT_MAX_TOKENS = 128


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
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if args.json is not None:
        _check_writable(args.json)
    rounds = args.rounds or DEFAULT_ROUNDS
    questions = load_questions(args.questions) if args.questions else _own_questions(rounds + 1, args.seed)
    if len(questions) < rounds + 1:
        raise ConfigurationError(
            f"{rounds} rounds need {rounds + 1} questions (one to warm up), but there are {len(questions)}"
        )
    comparison = compare(
        model=args.model or _demo_model(),
        questions=questions[: rounds + 1],
        agents=args.agents,
        max_tokens=args.max_tokens or DEFAULT_MAX_TOKENS,
        seed=args.seed,
    )
    show(comparison)
    if args.json is not None:
        _write(args.json, comparison)
    return 0


def _own_questions(count: int, seed: int) -> list[str]:
    """Two word problems in one question, so that there is something to share."""
    problems = generate_problems(2 * count, seed)
    return [f"{a.question} And then: {b.question}" for a, b in zip(problems[::2], problems[1::2], strict=True)]


def _demo_model() -> str:
    from kvcomm_integrations.demo_model import ensure_demo_model

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return str(ensure_demo_model())


def _check_writable(path: Path) -> None:
    if not path.resolve().parent.is_dir():
        raise ConfigurationError(f"cannot write {path}: the folder {path.resolve().parent} does not exist")


def _write(path: Path, comparison: Comparison) -> None:
    try:
        path.write_text(json.dumps(as_json(comparison), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
