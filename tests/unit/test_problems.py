"""Generated questions and documents, and reading a file of questions."""

from __future__ import annotations

import hashlib
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm_integrations.bench.problems import (
    TEMPLATES,
    TOKENS_PER_WORD,
    generate_documents,
    generate_problems,
    load_questions,
)
from kvcomm_integrations.errors import ConfigurationError


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_there_are_many_templates_and_all_are_used() -> None:
    assert len(TEMPLATES) >= 12
    shapes = {re.sub(r"[A-Z]\w+|\d+|[a-z]+s\b", "_", p.question) for p in generate_problems(len(TEMPLATES), 0)}
    assert len(shapes) == len(TEMPLATES)


@given(st.integers(0, 60), st.integers())
def test_problems_are_deterministic_and_different(n: int, seed: int) -> None:
    problems = generate_problems(n, seed)
    assert problems == generate_problems(n, seed)
    assert len({p.question for p in problems}) == n
    assert problems[: n // 2] == generate_problems(n // 2, seed)


@pytest.mark.parametrize(
    ("texts", "digest"),
    [
        (lambda: [f"{p.question} {p.answer}" for p in generate_problems(200, 3)], "f1bfdb3dc4adabf1"),
        (lambda: generate_documents(20, 3), "47172ee872a0c02b"),
    ],
    ids=["problems", "documents"],
)
def test_published_figures_can_be_measured_again(texts, digest: str) -> None:
    """The same seed gives the same text in every version: figures in the docs were measured on it."""
    assert hashlib.sha256("\n".join(texts()).encode()).hexdigest()[:16] == digest


def test_seeds_give_different_problems() -> None:
    assert not {p.question for p in generate_problems(50, 1)} & {p.question for p in generate_problems(50, 2)}


def test_problems_do_not_depend_on_the_process() -> None:
    code = "from kvcomm_integrations.bench.problems import *; print(generate_problems(20, 5), generate_documents(1, 5))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == f"{generate_problems(20, 5)} {generate_documents(1, 5)}\n"


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_answers_are_whole_positive_and_not_given_away(template) -> None:
    for seed in range(300):
        problem = template(random.Random(seed))
        assert isinstance(problem.answer, int)
        assert problem.answer > 0
        assert problem.question.endswith("?")
        assert 3 <= len(numbers(problem.question)) <= 8


def by_template(name: str) -> list:
    (template,) = (t for t in TEMPLATES if t.name == name)
    return [template(random.Random(seed)) for seed in range(100)]


def test_answers_follow_from_the_text() -> None:
    """Some templates, worked out again from the numbers a reader sees."""
    for problem in by_template("change"):
        n, price, m, cost, paid = numbers(problem.question)
        assert problem.answer == paid - n * price - m * cost
    for problem in by_template("saving"):
        price, saved, earned, spent = numbers(problem.question)
        assert saved + problem.answer * (earned - spent) == price
    for problem in by_template("reading"):
        pages, days, daily, weekend, again = numbers(problem.question)
        assert daily == again
        assert days * daily + 2 * weekend + problem.answer * daily == pages
    for problem in by_template("tickets"):
        rows, seats, empty, children, adult, child = numbers(problem.question)
        assert problem.answer == children * child + (rows * seats - empty - children) * adult
    for problem in by_template("discount"):
        coat, shoes, percent, delivery = numbers(problem.question)
        assert 100 * (problem.answer - delivery) == (coat + shoes) * (100 - percent)
    for problem in by_template("farm"):
        animals, cups, bag, price, days = numbers(problem.question)
        assert problem.answer * bag == animals * cups * days * price
    for problem in by_template("exam"):
        *scores, mean = numbers(problem.question)
        assert sum(scores) + problem.answer == 4 * mean


@pytest.mark.parametrize(("low", "high"), [(60, 60), (500, 900), (3000, 3000)])
def test_documents_have_the_length_asked_for(low: int, high: int) -> None:
    for document in generate_documents(20, 3, low, high):
        tokens = len(document.split()) * TOKENS_PER_WORD
        assert low - 20 <= tokens <= high + 20


def test_estimated_tokens_agree_with_the_tokenizer(demo_model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    for document in generate_documents(20, 0, 700, 700):
        assert 0.9 * 700 <= len(tokenizer.encode(document).ids) <= 1.1 * 700


def test_documents_read_like_text() -> None:
    documents = generate_documents(10, 0)
    assert len(set(documents)) == 10
    for document in documents:
        sentences = re.split(r"(?<=[.])\s", document)
        assert len(set(sentences)) == len(sentences)
        assert len(set(document.split())) > 100
        assert "{" not in document
    assert generate_documents(10, 0) == documents
    assert not set(documents) & set(generate_documents(10, 1))


@pytest.mark.parametrize("arguments", [(-1,), (1, 0, 900, 500), (1, 0, 5, 500), (1, 0, 500, 10**6)])
def test_impossible_documents_are_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError):
        generate_documents(*arguments)


def test_negative_number_of_problems_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="-3"):
        generate_problems(-3)


def test_load_questions(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(
        '\ufeff{"question": "One?", "answer": "1"}\r\n\n  \n{"question": "Zwei\\u2028\u2028?"}', encoding="utf-8"
    )
    assert load_questions(path) == ["One?", "Zwei\u2028\u2028?"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"question": "a"}\n\n{"question": ', r"line 3: not JSON .* column"),
        (b'{"question": "a"}\n["b"]\n', r'line 2: expected an object with a "question", got \["b"\]'),
        (b'{"prompt": "a"}', r'line 1: expected an object with a "question"'),
        (b'{"question": 7}', r'line 1: "question" must be a text that is not empty, got 7'),
        (b'{"question": " "}', r"line 1: .* not empty"),
        (b"\n \n", "holds no questions"),
        (b'{"question": "\xff"}', "not UTF-8"),
    ],
)
def test_bad_questions_are_named_by_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        load_questions(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere.jsonl: No such file"):
        load_questions(tmp_path / "nowhere.jsonl")
