"""Questions and documents for measurements: made up from templates, the same for the same seed.

The word problems have the form of GSM8K (two to five steps of arithmetic, a whole number as answer) but are our own.
Texts and templates are in ``word_problems.toml`` and ``documents.toml``.
"""

from __future__ import annotations

import json
import random
import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvcomm_integrations.errors import ConfigurationError

TOKENS_PER_WORD = 1.335
"""Of the documents below under SmolLM2's tokenizer, punctuation and line breaks included; other tokenizers are near."""
SLOT = re.compile(r"\{(?P<slot>[a-z]+)\}")


def _data(name: str) -> dict[str, Any]:
    return tomllib.loads((files(__package__) / name).read_text(encoding="utf-8"))


WORD_PROBLEMS, DOCUMENTS = _data("word_problems.toml"), _data("documents.toml")


@dataclass(frozen=True)
class Problem:
    """A word problem and the whole number that answers it."""

    question: str
    answer: int


class Template:
    """A kind of word problem, from its table in ``word_problems.toml``."""

    def __init__(self, *, name: str, draws: dict[str, str], question: str, answer: str, valid: str = "True") -> None:
        self.name = name
        self._question = question
        self._draws = [(names.split(), compile(source, name, "eval")) for names, source in draws.items()]
        self._answer, self._valid = (compile(source, name, "eval") for source in (answer, valid))

    def __call__(self, rng: random.Random) -> Problem:
        """A problem of this kind."""
        known: dict[str, Any] = {"__builtins__": {}, **WORD_PROBLEMS["words"]}
        known["to"] = lambda low, high, step=1: range(low, high + 1, step)
        for names, source in self._draws:
            found = eval(source, known)
            if isinstance(found, int):
                drawn = [found]
            else:
                drawn = rng.sample(found, len(names)) if len(names) > 1 else [rng.choice(found)]
            known.update(zip(names, drawn, strict=True))
        if not eval(self._valid, known):
            return self(rng)
        return Problem(self._question.format_map(known), eval(self._answer, known))


TEMPLATES = tuple(Template(**table) for table in WORD_PROBLEMS["problems"])


def generate_problems(n: int, seed: int = 0) -> list[Problem]:
    """``n`` different word problems; every template appears before one is used again.

    Raises:
        ConfigurationError: ``n`` is negative.
    """
    if n < 0:
        raise ConfigurationError(f"cannot generate {n} problems; ask for 0 or more")
    rng = random.Random(f"problems-{seed}")
    problems: dict[str, Problem] = {}
    deck: list[Template] = []
    while len(problems) < n:
        if not deck:
            deck = rng.sample(TEMPLATES, len(TEMPLATES))
        problem = deck.pop()(rng)
        problems.setdefault(problem.question, problem)
    return list(problems.values())


def load_questions(path: str | Path) -> list[str]:
    """The ``question`` of every line of a JSONL file; blank lines are skipped, other fields ignored.

    Raises:
        ConfigurationError: the file cannot be read or holds no question; a line is not JSON or has no question. The
            message gives the line number.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as err:
        raise ConfigurationError(f"cannot read questions from {path}: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise ConfigurationError(f"{path} is not UTF-8 text (byte {err.start}); save it as UTF-8") from err
    questions = [
        _question(line, f"{path}, line {number}") for number, line in enumerate(text.split("\n"), 1) if line.strip()
    ]
    if not questions:
        raise ConfigurationError(f'{path} holds no questions; write one {{"question": "..."}} a line')
    return questions


def _question(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as err:
        raise ConfigurationError(f"{where}: not JSON ({err.msg} at column {err.colno})") from err
    if not isinstance(record, dict) or "question" not in record:
        raise ConfigurationError(f'{where}: expected an object with a "question", got {line.strip()[:60]}')
    question = record["question"]
    if not isinstance(question, str) or not question.strip():
        raise ConfigurationError(f'{where}: "question" must be a text that is not empty, got {question!r}')
    return question


def generate_documents(n: int, seed: int = 0, min_tokens: int = 500, max_tokens: int = 900) -> list[str]:
    """``n`` different reports in plain prose, each of about ``min_tokens`` to ``max_tokens`` tokens.

    Lengths are counted in words and converted (``TOKENS_PER_WORD``), so a tokenizer may find some per cent more or
    less. No sentence occurs twice in a document.

    Raises:
        ConfigurationError: ``n`` is negative, the range is empty, or it is outside 20 to 20000 tokens.
    """
    if n < 0:
        raise ConfigurationError(f"cannot generate {n} documents; ask for 0 or more")
    if not 20 <= min_tokens <= max_tokens <= 20000:
        raise ConfigurationError(
            f"documents of {min_tokens} to {max_tokens} tokens cannot be made; "
            "use 20 <= min_tokens <= max_tokens <= 20000"
        )
    rng = random.Random(f"documents-{seed}")
    return [_document(rng, round(rng.uniform(min_tokens, max_tokens) / TOKENS_PER_WORD)) for _ in range(n)]


def _sentence(rng: random.Random) -> str:
    """One sentence; a slot that occurs twice in it is filled with two different things."""
    pattern = rng.choice(DOCUMENTS["sentences"])
    hands = {slot: iter(rng.sample(words, 2)) for slot, words in DOCUMENTS["slots"].items() if f"{{{slot}" in pattern}

    def fill(match: re.Match[str]) -> str:
        bounds = DOCUMENTS["numbers"].get(match["slot"])
        return str(rng.randint(*bounds)) if bounds else next(hands[match["slot"]])

    text = SLOT.sub(fill, pattern)
    return text[0].upper() + text[1:]


def _document(rng: random.Random, words: int) -> str:
    """Prose of ``words`` words to within half a sentence, in paragraphs of four to seven sentences."""
    slots = DOCUMENTS["slots"]
    title = f"Report on {rng.choice(slots['work'])} of {rng.choice(slots['place'])}"
    count, seen = len(title.split()), set[str]()
    paragraphs: list[list[str]] = []
    room = 0
    while True:
        sentence = _sentence(rng)
        length = len(sentence.split())
        if paragraphs and count + length / 2 > words:
            return "\n\n".join([title, *(" ".join(paragraph) for paragraph in paragraphs)])
        if sentence in seen:
            continue
        seen.add(sentence)
        count += length
        if room == 0:
            paragraphs.append([])
            room = rng.randint(4, 7)
        paragraphs[-1].append(sentence)
        room -= 1
