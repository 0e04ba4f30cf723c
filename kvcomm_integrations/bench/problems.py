"""Questions and documents for measurements: made up from templates, the same for the same seed. Knows no engine.

The word problems have the form of GSM8K (two to five steps of arithmetic, a whole number as answer) but are our own.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcomm_integrations.errors import ConfigurationError

TOKENS_PER_WORD = 1.335
"""Of the documents below under SmolLM2's tokenizer, punctuation and line breaks included; other tokenizers are near."""


@dataclass(frozen=True)
class Problem:
    """A word problem and the whole number that answers it."""

    question: str
    answer: int


Template = Callable[[random.Random], Problem]


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


# --- word problems ---------------------------------------------------------------------------------------------------

NAMES = (
    "Amara", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hiro", "Ines", "Jamal", "Kavya", "Lars", "Mei",
    "Nadia", "Omar", "Petra", "Quentin", "Rosa", "Samir", "Tove", "Uma", "Viktor", "Wanda", "Ximena", "Yusuf", "Zoe",
)  # fmt: skip
FRUITS = ("apples", "pears", "plums", "oranges", "peaches", "mangoes", "figs", "apricots")
STATIONERY = ("notebooks", "pencils", "rulers", "markers", "folders", "erasers", "crayons", "highlighters")
BAKERY = ("muffins", "bagels", "scones", "croissants", "cookies", "brownies", "pretzels", "rolls")
SAVINGS = ("a bicycle", "a telescope", "a guitar", "a tent", "a camera", "a skateboard", "a keyboard", "a kayak")
VENUES = ("theater", "stadium", "concert hall", "lecture hall", "cinema", "circus tent")
BOOKS = ("novel", "biography", "cookbook", "history book", "travel guide", "collection of stories")
CROPS = ("tomatoes", "carrots", "cabbages", "pumpkins", "potatoes", "onions", "peppers", "beets")
ANIMALS = ("hens", "goats", "rabbits", "ducks", "sheep", "geese")
VEHICLES = ("van", "truck", "bus", "train", "motorboat", "delivery car")
SUBJECTS = ("chemistry", "geometry", "history", "biology", "geography", "music theory")


def _change(rng: random.Random) -> Problem:
    name, (item, other) = rng.choice(NAMES), rng.sample(STATIONERY, 2)
    n, m, price, cost = rng.randint(3, 12), rng.randint(2, 9), rng.randint(2, 6), rng.randint(1, 5)
    total = n * price + m * cost
    paid = (total // 20 + rng.randint(1, 3)) * 20
    return Problem(
        f"{name} buys {n} {item} for ${price} each and {m} {other} for ${cost} each. "
        f"{name} pays with ${paid} in bills. How many dollars of change does {name} get back?",
        paid - total,
    )


def _bakery(rng: random.Random) -> Problem:
    name, item = rng.choice(NAMES), rng.choice(BAKERY)
    trays, per_tray, price = rng.randint(4, 11), rng.choice((6, 8, 12, 16, 24)), rng.randint(2, 5)
    given = rng.randint(3, trays * per_tray // 3)
    return Problem(
        f"A bakery run by {name} makes {trays} trays of {item} every morning, with {per_tray} {item} on each tray. "
        f"{given} of them go to the staff for breakfast and the rest are sold for ${price} each. "
        f"How much money, in dollars, does the bakery take for {item} in a day?",
        (trays * per_tray - given) * price,
    )


def _orchard(rng: random.Random) -> Problem:
    (first, second), fruit = rng.sample(NAMES, 2), rng.choice(FRUITS)
    half, factor, eaten = rng.randint(8, 30), rng.randint(2, 4), rng.randint(2, 7)
    return Problem(
        f"{first} picks {2 * half} {fruit} before lunch and half as many after lunch. {second} picks {factor} times "
        f"as many {fruit} as {first} does in the whole day. On the way home they eat {eaten} {fruit} together. "
        f"How many {fruit} do they have left?",
        3 * half * (1 + factor) - eaten,
    )


def _saving(rng: random.Random) -> Problem:
    name, thing = rng.choice(NAMES), rng.choice(SAVINGS)
    weeks, earned, spent, start = rng.randint(6, 20), rng.randint(18, 40), rng.randint(3, 12), rng.randint(10, 60)
    price = start + weeks * (earned - spent)
    return Problem(
        f"{name} wants to buy {thing} that costs ${price} and has already saved ${start}. Every week {name} earns "
        f"${earned} by walking dogs and spends ${spent} on lunch. "
        f"In how many weeks will {name} have enough money?",
        weeks,
    )


def _tickets(rng: random.Random) -> Problem:
    venue, adult, child = rng.choice(VENUES), rng.randint(9, 25), rng.randint(4, 8)
    rows, seats, empty = rng.randint(8, 20), rng.randint(10, 24), rng.randint(4, 30)
    children = rng.randint(20, rows * seats // 2)
    adults = rows * seats - empty - children
    return Problem(
        f"A {venue} has {rows} rows of {seats} seats. One evening {empty} seats stay empty and {children} of the "
        f"visitors are children. An adult pays ${adult} and a child pays ${child}. "
        "How many dollars are taken for tickets that evening?",
        adults * adult + children * child,
    )


def _reading(rng: random.Random) -> Problem:
    name, book = rng.choice(NAMES), rng.choice(BOOKS)
    days, daily, weekend, left = rng.randint(3, 6), rng.randint(12, 35), rng.randint(30, 70), rng.randint(2, 9)
    rest = daily * left
    return Problem(
        f"{name} is reading a {book} of {days * daily + 2 * weekend + rest} pages. For {days} days {name} reads "
        f"{daily} pages a day, then {weekend} pages on Saturday and as many on Sunday. "
        f"At {daily} pages a day, how many more days does {name} need to finish the {book}?",
        left,
    )


def _garden(rng: random.Random) -> Problem:
    name, (crop, other) = rng.choice(NAMES), rng.sample(CROPS, 2)
    rows, each, lost = rng.randint(5, 14), rng.randint(6, 15), rng.randint(3, 20)
    more = rng.randint(5, 40)
    return Problem(
        f"In the garden of {name} there are {rows} rows of {crop} with {each} plants in every row, and {more} more "
        f"plants of {other} than of {crop}. A storm destroys {lost} of the {other}. "
        "How many plants are left in the garden altogether?",
        2 * rows * each + more - lost,
    )


def _travel(rng: random.Random) -> Problem:
    name, vehicle = rng.choice(NAMES), rng.choice(VEHICLES)
    fast, slow = rng.choice((60, 70, 80, 90)), rng.choice((30, 40, 50))
    first, second, back = rng.randint(2, 4), rng.randint(1, 5), rng.randint(2, 8) * 5
    return Problem(
        f"{name} drives a {vehicle} for {first} hours at {fast} kilometers an hour and then for {second} hours at "
        f"{slow} kilometers an hour. Having missed the turn, {name} goes back {back} kilometers. "
        "How many kilometers has the whole journey been so far?",
        first * fast + second * slow + back,
    )


def _farm(rng: random.Random) -> Problem:
    name, animal = rng.choice(NAMES), rng.choice(ANIMALS)
    cups, count, price = rng.randint(2, 5), rng.randint(12, 40), rng.randint(2, 6)
    days = rng.choice((7, 10, 14, 30))
    bag = rng.choice([size for size in range(2, 61) if cups * count * days % size == 0][-6:])
    return Problem(
        f"{name} keeps {count} {animal}, and each of them eats {cups} cups of feed a day. Feed comes in bags of "
        f"{bag} cups for ${price} a bag. How many dollars does {name} spend on feed in {days} days?",
        cups * count * days // bag * price,
    )


def _wages(rng: random.Random) -> Problem:
    name, base = rng.choice(NAMES), rng.randint(6, 14) * 2
    hours, over, tax = rng.randint(30, 40), rng.randint(2, 10), rng.randint(20, 90)
    return Problem(
        f"{name} is paid ${base} an hour for the first {hours} hours of a week and one and a half times as much for "
        f"every further hour. Last week {name} worked {hours + over} hours, and ${tax} were kept back for insurance. "
        f"How many dollars did {name} receive?",
        base * hours + base * 3 // 2 * over - tax,
    )


def _ages(rng: random.Random) -> Problem:
    first, second, third = rng.sample(NAMES, 3)
    young, factor, older, years = rng.randint(4, 12), rng.randint(2, 4), rng.randint(2, 9), rng.randint(3, 12)
    return Problem(
        f"{first} is {young} years old. {second} is {factor} times as old as {first}, and {third} is {older} years "
        f"older than {second}. What will be the sum of their three ages in {years} years?",
        young + 2 * young * factor + older + 3 * years,
    )


def _boxes(rng: random.Random) -> Problem:
    name, item = rng.choice(NAMES), rng.choice(STATIONERY)
    small, large, boxes = rng.randint(6, 12), rng.randint(15, 30), rng.randint(4, 12)
    crates, broken = rng.randint(3, 9), rng.randint(2, 15)
    return Problem(
        f"A shop receives {boxes} small boxes with {small} {item} each and {crates} large boxes with {large} {item} "
        f"each. {name} finds that {broken} {item} are broken, throws them away and puts half of the others on the "
        f"shelf, or one more than the rest if the number is odd. How many {item} are on the shelf?",
        (boxes * small + crates * large - broken + 1) // 2,
    )


def _discount(rng: random.Random) -> Problem:
    name, percent = rng.choice(NAMES), rng.choice((10, 20, 25, 30, 40, 50))
    coat, shoes, shipping = rng.randint(4, 12) * 20, rng.randint(2, 6) * 20, rng.randint(4, 15)
    return Problem(
        f"A coat costs ${coat} and a pair of shoes ${shoes}. In a sale {name} gets {percent}% off both, and pays "
        f"${shipping} for delivery. How many dollars does {name} pay in total?",
        (coat + shoes) * (100 - percent) // 100 + shipping,
    )


def _tank(rng: random.Random) -> Problem:
    name = rng.choice(NAMES)
    fill, leak, minutes = rng.randint(12, 30), rng.randint(2, 9), rng.randint(6, 25)
    start, used = rng.randint(5, 20) * 10, rng.randint(2, 8) * 5
    return Problem(
        f"A tank holds {start} liters of water. {name} opens a tap that adds {fill} liters a minute while a crack "
        f"loses {leak} liters a minute. After {minutes} minutes {name} closes the tap, mends the crack and takes out "
        f"{used} liters for the plants. How many liters are in the tank now?",
        start + (fill - leak) * minutes - used,
    )


def _exam(rng: random.Random) -> Problem:
    name, subject = rng.choice(NAMES), rng.choice(SUBJECTS)
    scores, mean = [rng.randint(60, 95) for _ in range(3)], rng.randint(75, 90)
    last = 4 * mean - sum(scores)
    if not 40 <= last <= 100:
        return _exam(rng)
    return Problem(
        f"{name} has taken three {subject} tests and scored {scores[0]}, {scores[1]} and {scores[2]} points. "
        f"How many points does {name} need in the fourth test for an average of exactly {mean}?",
        last,
    )


def _relay(rng: random.Random) -> Problem:
    first, second = rng.sample(NAMES, 2)
    laps, length, minutes = rng.randint(4, 12), rng.choice((200, 250, 300, 400)), rng.randint(2, 4)
    weeks, days = rng.randint(2, 6), rng.randint(2, 5)
    return Problem(
        f"{first} runs {laps} laps of a {length} meter track on {days} days of every week. {second} runs on the same "
        f"days but covers twice the distance, and needs {minutes} minutes for a lap. "
        f"How many minutes does {second} run in {weeks} weeks?",
        2 * laps * minutes * days * weeks,
    )


TEMPLATES: tuple[Template, ...] = (
    _change, _bakery, _orchard, _saving, _tickets, _reading, _garden, _travel, _farm, _wages, _ages, _boxes, _discount,
    _tank, _exam, _relay,
)  # fmt: skip


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
