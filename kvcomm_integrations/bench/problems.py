"""Questions and documents for measurements: made up from templates, the same for the same seed.

The word problems have the form of GSM8K (two to five steps of arithmetic, a whole number as answer) but are our own.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from kvcomm_integrations.bench.word_problems import NAMES, TEMPLATES, Problem, Template
from kvcomm_integrations.errors import ConfigurationError

TOKENS_PER_WORD = 1.335
"""Of the documents below under SmolLM2's tokenizer, punctuation and line breaks included; other tokenizers are near."""


def generate_problems(n: int, seed: int = 0) -> list[Problem]:
    """``n`` different word problems; every template appears before one is used again.

    Raises:
        ConfigurationError: ``n`` is negative.
    """
    if n < 0:
        raise ConfigurationError(f"cannot generate {n} problems; ask for 0 or more")
    rng = random.Random(f"problems-{seed}")
    problems: list[Problem] = []
    seen: set[str] = set()
    deck: list[Template] = []
    while len(problems) < n:
        if not deck:
            deck = rng.sample(TEMPLATES, len(TEMPLATES))
        problem = deck.pop()(rng)
        if problem.question not in seen:
            seen.add(problem.question)
            problems.append(problem)
    return problems


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


# --- documents -------------------------------------------------------------------------------------------------------


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


SLOTS: dict[str, tuple[str, ...]] = {
    "place": (
        "Aldermoor", "Brackwater", "Cinderford", "Dunmarsh", "Eastholm", "Fenwick Bay", "Grayling", "Hollowmere",
        "Irongate", "Juniper Falls", "Kestrel Point", "Lindenau", "Marrow Hill", "Northreach", "Oakhaven", "Pellworth",
    ),
    "name": NAMES,
    "group": (
        "the harbor office", "the town council", "a team of surveyors", "the water board", "the local museum",
        "the railway company", "the school of engineering", "a group of volunteers", "the county library",
        "the forest service", "the fishing cooperative", "the regional hospital", "the weather station",
        "the power company",
    ),
    "work": (
        "the old bridge", "the northern reservoir", "the tram line", "the covered market", "the sea wall",
        "the public archive", "the mountain road", "the botanical garden", "the lighthouse", "the grain store",
        "the canal lock", "the observatory", "the bus depot", "the sports hall", "the wind farm", "the fish ladder",
    ),
    "done": (
        "repaired", "measured", "extended", "inspected", "repainted", "closed for the winter", "insured",
        "handed over to the public", "photographed from the air", "connected to the grid", "moved to a new site",
        "listed as a monument",
    ),
    "cause": (
        "heavy rain in the spring", "a shortage of skilled workers", "a generous gift from a former resident",
        "the rising price of steel", "a change in the law", "a row of mild winters", "an unusually dry summer",
        "the success of a smaller trial", "an error in the original drawings", "a late delivery of parts",
        "the growing number of visitors", "a petition by the neighbors",
    ),
    "result": (
        "the costs stayed below the estimate", "the work took longer than planned", "traffic fell by a third",
        "fewer accidents were reported", "more families moved into the area", "the noise at night almost ceased",
        "the water became clearer", "most of the shops stayed open", "the budget had to be revised twice",
        "repairs were needed less often", "tickets sold out within hours", "two nearby towns asked for advice",
    ),
    "opinion": (
        "called it a sensible first step", "warned against celebrating too early", "asked for a second opinion",
        "praised the patience of the residents", "would have preferred a cheaper design",
        "promised a full report by autumn", "compared it with a similar project abroad",
        "doubted that the figures could be repeated", "recommended a trial of twelve months",
        "was surprised by how little had changed",
    ),
    "role": (
        "the engineer", "the mayor", "a biologist", "an accountant", "a historian", "a retired teacher",
        "the ferry captain", "a nurse", "the architect", "a student of law", "the gardener",
    ),
    "unit": (
        "tons of gravel", "meters of cable", "seedlings", "letters", "hours of work", "square meters of roof",
        "photographs", "liters of paint",
    ),
    "month": (
        "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
        "December",
    ),
    "opener": (
        "In the meantime", "At first", "To everyone's surprise", "According to the minutes", "Not long afterwards",
        "For the second year running", "On closer inspection", "As so often", "Without much notice",
    ),
}  # fmt: skip
"""What a slot of a sentence may be filled with."""
NUMBERS = {"year": (1931, 2024), "few": (2, 48), "many": (60, 9800)}
"""The range of a slot that is filled with a number."""
SLOT = re.compile(r"\{(?P<slot>[a-z]+)\}")

SENTENCES = (
    "In {month} {year}, {group} announced that {work} in {place} would be {done}.",
    "Until {year}, {work} belonged to {group}, which had it {done} every {few} years.",
    "{opener}, {work} was {done}, and by {month} {result}.",
    "Because of {cause}, {result}, although {result}.",
    "{opener}, {cause} forced {group} to spend the money set aside for {work}.",
    "Nobody had expected that {cause} would matter so much, but within {few} months {result}.",
    "{name}, {role} from {place}, {opinion} and {opinion}.",
    '"We began with {many} {unit} and ended with {many}," said {name}, {role} in charge of {work}.',
    "{role} {opinion}, while {group} {opinion}.",
    "{opener}, {group} used {many} {unit} for {work}, which is {few} per cent more than in {place}.",
    "A count in {month} found {many} {unit}; the one before it, made in {year}, had found {many}.",
    "Of the {many} visitors asked near {work}, most were content, {few} were not, and {name} {opinion}.",
    "While {work} was {done} within {few} weeks, {work} had to wait, and {result}.",
    "Unlike {place}, where {result}, {place} decided that {work} should not be {done}.",
    "Whether {cause} alone explains why {result} is a question that {group} has left open.",
    "The report of {year} blamed {cause}; {name} and {name} of {group} believe that it was {cause}.",
    "From {month} on, {name} and {few} colleagues will look after {work}, provided that {group} pays for it.",
    "If {work} is {done} as planned, {place} will need {many} {unit} less every year.",
    "A footnote adds that {group} once lent {many} {unit} to {place} and never saw them again.",
    "{opener}, {name} showed the drawings to {group}, and {role} {opinion}.",
)


def _sentence(rng: random.Random) -> str:
    """One sentence; a slot that occurs twice in it is filled with two different things."""
    pattern = rng.choice(SENTENCES)
    hands = {slot: iter(rng.sample(values, 2)) for slot, values in SLOTS.items() if f"{{{slot}" in pattern}

    def fill(match: re.Match[str]) -> str:
        slot = match["slot"]
        if slot in NUMBERS:
            return str(rng.randint(*NUMBERS[slot]))
        return next(hands[slot])

    text = SLOT.sub(fill, pattern)
    return text[0].upper() + text[1:]


def _document(rng: random.Random, words: int) -> str:
    """Prose of ``words`` words to within half a sentence, in paragraphs of four to seven sentences."""
    title = f"Report on {rng.choice(SLOTS['work'])} of {rng.choice(SLOTS['place'])}"
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
