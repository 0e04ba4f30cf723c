"""The templates of the word problems: what is drawn, in this order, the question, and how its answer is computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

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


@dataclass(frozen=True)
class Problem:
    """A word problem and the whole number that answers it."""

    question: str
    answer: int


Choice = Sequence[Any]
Values = SimpleNamespace
"""What has been drawn so far, by name."""


@dataclass(frozen=True)
class Template:
    """A kind of word problem.

    Args:
        name: of the kind.
        draws: by name, in the order in which they are drawn: a sequence to choose from, or a function of what has been
            drawn that gives one, or gives the value itself. Two names and more draw as many different elements.
        question: text with the names in braces.
        answer: computes the answer.
        valid: draws are repeated until it holds.
    """

    name: str
    draws: Mapping[str, Choice | Callable[[Values], Choice | int]]
    question: str
    answer: Callable[[Values], int]
    valid: Callable[[Values], bool] = lambda v: True

    def __call__(self, rng: random.Random) -> Problem:
        """A problem of this kind."""
        while True:
            values = Values()
            for names, source in self.draws.items():
                drawn = source(values) if callable(source) else source
                if isinstance(drawn, int):
                    setattr(values, names, drawn)
                elif " " in names:
                    found = rng.sample(drawn, len(names.split()))
                    vars(values).update(zip(names.split(), found, strict=True))
                else:
                    setattr(values, names, rng.choice(drawn))
            if self.valid(values):
                return Problem(self.question.format_map(vars(values)), self.answer(values))


def to(low: int, high: int, step: int = 1) -> range:
    """Whole numbers from ``low`` to ``high``, both included."""
    return range(low, high + 1, step)


TEMPLATES: tuple[Template, ...] = (
    Template(
        "change",
        {"name": NAMES, "item other": STATIONERY, "n": to(3, 12), "m": to(2, 9), "price": to(2, 6), "cost": to(1, 5),
         "total": lambda v: v.n * v.price + v.m * v.cost, "bills": to(1, 3),
         "paid": lambda v: (v.total // 20 + v.bills) * 20},
        "{name} buys {n} {item} for ${price} each and {m} {other} for ${cost} each. {name} pays with ${paid} in bills. "
        "How many dollars of change does {name} get back?",
        lambda v: v.paid - v.total,
    ),
    Template(
        "bakery",
        {"name": NAMES, "item": BAKERY, "trays": to(4, 11), "each": (6, 8, 12, 16, 24), "price": to(2, 5),
         "given": lambda v: to(3, v.trays * v.each // 3)},
        "A bakery run by {name} makes {trays} trays of {item} every morning, with {each} {item} on each tray. "
        "{given} of them go to the staff for breakfast and the rest are sold for ${price} each. "
        "How much money, in dollars, does the bakery take for {item} in a day?",
        lambda v: (v.trays * v.each - v.given) * v.price,
    ),
    Template(
        "orchard",
        {"first second": NAMES, "fruit": FRUITS, "half": to(8, 30), "factor": to(2, 4), "eaten": to(2, 7),
         "whole": lambda v: 2 * v.half},
        "{first} picks {whole} {fruit} before lunch and half as many after lunch. {second} picks {factor} times as "
        "many {fruit} as {first} does in the whole day. On the way home they eat {eaten} {fruit} together. "
        "How many {fruit} do they have left?",
        lambda v: 3 * v.half * (1 + v.factor) - v.eaten,
    ),
    Template(
        "saving",
        {"name": NAMES, "thing": SAVINGS, "weeks": to(6, 20), "earned": to(18, 40), "spent": to(3, 12),
         "start": to(10, 60), "price": lambda v: v.start + v.weeks * (v.earned - v.spent)},
        "{name} wants to buy {thing} that costs ${price} and has already saved ${start}. Every week {name} earns "
        "${earned} by walking dogs and spends ${spent} on lunch. In how many weeks will {name} have enough money?",
        lambda v: v.weeks,
    ),
    Template(
        "tickets",
        {"venue": VENUES, "adult": to(9, 25), "child": to(4, 8), "rows": to(8, 20), "seats": to(10, 24),
         "empty": to(4, 30), "children": lambda v: to(20, v.rows * v.seats // 2)},
        "A {venue} has {rows} rows of {seats} seats. One evening {empty} seats stay empty and {children} of the "
        "visitors are children. An adult pays ${adult} and a child pays ${child}. "
        "How many dollars are taken for tickets that evening?",
        lambda v: (v.rows * v.seats - v.empty - v.children) * v.adult + v.children * v.child,
    ),
    Template(
        "reading",
        {"name": NAMES, "book": BOOKS, "days": to(3, 6), "daily": to(12, 35), "weekend": to(30, 70), "left": to(2, 9),
         "pages": lambda v: v.days * v.daily + 2 * v.weekend + v.daily * v.left},
        "{name} is reading a {book} of {pages} pages. For {days} days {name} reads {daily} pages a day, then {weekend} "
        "pages on Saturday and as many on Sunday. "
        "At {daily} pages a day, how many more days does {name} need to finish the {book}?",
        lambda v: v.left,
    ),
    Template(
        "garden",
        {"name": NAMES, "crop other": CROPS, "rows": to(5, 14), "each": to(6, 15), "lost": to(3, 20),
         "more": to(5, 40)},
        "In the garden of {name} there are {rows} rows of {crop} with {each} plants in every row, and {more} more "
        "plants of {other} than of {crop}. A storm destroys {lost} of the {other}. "
        "How many plants are left in the garden altogether?",
        lambda v: 2 * v.rows * v.each + v.more - v.lost,
    ),
    Template(
        "travel",
        {"name": NAMES, "vehicle": VEHICLES, "fast": (60, 70, 80, 90), "slow": (30, 40, 50), "first": to(2, 4),
         "second": to(1, 5), "back": to(10, 40, 5)},
        "{name} drives a {vehicle} for {first} hours at {fast} kilometers an hour and then for {second} hours at "
        "{slow} kilometers an hour. Having missed the turn, {name} goes back {back} kilometers. "
        "How many kilometers has the whole journey been so far?",
        lambda v: v.first * v.fast + v.second * v.slow + v.back,
    ),
    Template(
        "farm",
        {"name": NAMES, "animal": ANIMALS, "cups": to(2, 5), "count": to(12, 40), "price": to(2, 6),
         "days": (7, 10, 14, 30), "needed": lambda v: v.cups * v.count * v.days,
         "bag": lambda v: [size for size in to(2, 60) if v.needed % size == 0][-6:]},
        "{name} keeps {count} {animal}, and each of them eats {cups} cups of feed a day. Feed comes in bags of "
        "{bag} cups for ${price} a bag. How many dollars does {name} spend on feed in {days} days?",
        lambda v: v.needed // v.bag * v.price,
    ),
    Template(
        "wages",
        {"name": NAMES, "base": to(12, 28, 2), "hours": to(30, 40), "over": to(2, 10), "tax": to(20, 90),
         "all": lambda v: v.hours + v.over},
        "{name} is paid ${base} an hour for the first {hours} hours of a week and one and a half times as much for "
        "every further hour. Last week {name} worked {all} hours, and ${tax} were kept back for insurance. "
        "How many dollars did {name} receive?",
        lambda v: v.base * v.hours + v.base * 3 // 2 * v.over - v.tax,
    ),
    Template(
        "ages",
        {"first second third": NAMES, "young": to(4, 12), "factor": to(2, 4), "older": to(2, 9), "years": to(3, 12)},
        "{first} is {young} years old. {second} is {factor} times as old as {first}, and {third} is {older} years "
        "older than {second}. What will be the sum of their three ages in {years} years?",
        lambda v: v.young + 2 * v.young * v.factor + v.older + 3 * v.years,
    ),
    Template(
        "boxes",
        {"name": NAMES, "item": STATIONERY, "small": to(6, 12), "large": to(15, 30), "boxes": to(4, 12),
         "crates": to(3, 9), "broken": to(2, 15)},
        "A shop receives {boxes} small boxes with {small} {item} each and {crates} large boxes with {large} {item} "
        "each. {name} finds that {broken} {item} are broken, throws them away and puts half of the others on the "
        "shelf, or one more than the rest if the number is odd. How many {item} are on the shelf?",
        lambda v: (v.boxes * v.small + v.crates * v.large - v.broken + 1) // 2,
    ),
    Template(
        "discount",
        {"name": NAMES, "percent": (10, 20, 25, 30, 40, 50), "coat": to(80, 240, 20), "shoes": to(40, 120, 20),
         "shipping": to(4, 15)},
        "A coat costs ${coat} and a pair of shoes ${shoes}. In a sale {name} gets {percent}% off both, and pays "
        "${shipping} for delivery. How many dollars does {name} pay in total?",
        lambda v: (v.coat + v.shoes) * (100 - v.percent) // 100 + v.shipping,
    ),
    Template(
        "tank",
        {"name": NAMES, "fill": to(12, 30), "leak": to(2, 9), "minutes": to(6, 25), "start": to(50, 200, 10),
         "used": to(10, 40, 5)},
        "A tank holds {start} liters of water. {name} opens a tap that adds {fill} liters a minute while a crack "
        "loses {leak} liters a minute. After {minutes} minutes {name} closes the tap, mends the crack and takes out "
        "{used} liters for the plants. How many liters are in the tank now?",
        lambda v: v.start + (v.fill - v.leak) * v.minutes - v.used,
    ),
    Template(
        "exam",
        {"name": NAMES, "subject": SUBJECTS, "one": to(60, 95), "two": to(60, 95), "three": to(60, 95),
         "mean": to(75, 90), "last": lambda v: 4 * v.mean - v.one - v.two - v.three},
        "{name} has taken three {subject} tests and scored {one}, {two} and {three} points. "
        "How many points does {name} need in the fourth test for an average of exactly {mean}?",
        lambda v: v.last,
        valid=lambda v: 40 <= v.last <= 100,
    ),
    Template(
        "relay",
        {"first second": NAMES, "laps": to(4, 12), "length": (200, 250, 300, 400), "minutes": to(2, 4),
         "weeks": to(2, 6), "days": to(2, 5)},
        "{first} runs {laps} laps of a {length} meter track on {days} days of every week. {second} runs on the same "
        "days but covers twice the distance, and needs {minutes} minutes for a lap. "
        "How many minutes does {second} run in {weeks} weeks?",
        lambda v: 2 * v.laps * v.minutes * v.days * v.weeks,
    ),
)  # fmt: skip
