from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm_integrations.prompts.content import Content, Origin
from kvcomm_integrations.prompts.matching import (
    MAX_ALIKE,
    MIN_CHARACTERS,
    MIN_PART_CHARACTERS,
    ContentIndex,
    Match,
    gaps,
    longest_first,
    occurrences,
)

from .conversations import ANSWER, CODE, QUESTION


def content(text: str, name: str = "n") -> Content:
    return Content(f"{name}:{text}", name, text, (), Origin.REGISTERED)


def index(*contents: Content, whole: bool = True, parts: bool = True) -> ContentIndex:
    made = ContentIndex()
    for one in contents:
        made.add(one, whole=whole, parts=parts)
    return made


def found(where: ContentIndex, text: str, start: int = 0, end: int | None = None) -> list[tuple[int, int, str]]:
    matches = where.find(text, start, len(text) if end is None else end, lambda c: True)
    return [(m.start, m.end, m.content.core) for m in matches]


@pytest.mark.parametrize(
    "wrap", ["{}", "> {}", "```\n{}\n```", "Q: {}", '"{}"', "- {}\n- {}", "x" * 15 + " {}", "({})."]
)
def test_interpolated_contents_are_found(wrap: str) -> None:
    text = wrap.replace("{}", ANSWER)
    hits = found(index(content(f"  {ANSWER}\n"), content(QUESTION)), text)
    assert len(hits) == wrap.count("{}")
    assert all(text[a:b] == ANSWER == core for a, b, core in hits)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(MIN_CHARACTERS, 120), st.randoms(use_true_random=False))
def test_every_occurrence_is_found_at_every_alignment(before: int, after: int, length: int, rnd: random.Random) -> None:
    core = "".join(rnd.choice("abcdefgh") for _ in range(length))
    text = "." * before + core + "." + core + "!" * after
    assert [(a, b) for a, b, _ in found(index(content(core)), text)] == [
        (before, before + length),
        (before + length + 1, before + 2 * length + 1),
    ]


def test_longest_wins_and_none_overlap() -> None:
    long = f"{QUESTION} {ANSWER}"
    hits = found(index(content(QUESTION), content(ANSWER), content(long)), f"{ANSWER}\n{long}\n{QUESTION}")
    assert [core for _, _, core in hits] == [ANSWER, long, QUESTION]


def test_words_are_not_cut() -> None:
    known = index(content("the answer to all the questions is 4"))
    assert not found(known, "the answer to all the questions is 42")
    assert found(known, "the answer to all the questions is 4.")
    assert found(index(content("答案就是四十二" * 6)), "所以" + "答案就是四十二" * 6 + "吧")


def test_short_contents_are_only_found_by_name() -> None:
    short = content("x = 1")
    assert not found(index(short), "a\nx = 1\nb")
    assert [(m.start, m.end) for m in occurrences("x = 1, ax = 1, x = 12", 0, 21, short)] == [(0, 5)]
    assert not occurrences("abc", 0, 3, content(" \n"))


def test_range_and_acceptance() -> None:
    known = index(content(ANSWER))
    text = f"{ANSWER} {ANSWER}"
    assert len(found(known, text, 1)) == 1
    assert len(found(known, text, 0, len(text) - 1)) == 1
    assert not known.find(text, 0, len(text), lambda c: False)


def test_removed_contents_are_not_found() -> None:
    one, two = content(ANSWER), content(ANSWER + " " + CODE)
    known = index(one, two)
    known.remove(one)
    assert not found(known, ANSWER)
    known.remove(two)
    assert not known._grams and not known._lines


def test_newest_of_equal_texts() -> None:
    known = index(content(ANSWER, "old"), content(ANSWER, "new"))
    assert known.find(ANSWER, 0, len(ANSWER), lambda c: True)[0].content.name == "new"


DOC = "\n".join(f"Line {i} of the document says that {i} foxes jumped over {i * i} hens." for i in range(6))


def test_shared_lines_of_an_earlier_message() -> None:
    known = index(content(f"Context:\n{DOC}\n\nQuestion: what?"), whole=False)
    text = f"Please read:\n\n{DOC}\nThen review."
    (part,) = known.find_parts(text, 0, len(text))
    assert text[part.start : part.end] == DOC
    assert not found(known, text)


def test_shared_lines_end_with_the_line() -> None:
    known = index(content(f"Context:\n{DOC} And more."))
    text = f"{DOC} But otherwise."
    (part,) = known.find_parts(text, 0, len(text))
    assert text[part.start : part.end] == DOC.rsplit("\n", 1)[0]
    assert not known.find_parts("short", 0, 5)
    short = DOC[: MIN_PART_CHARACTERS // 2]
    assert not known.find_parts(f"{short}\nother", 0, len(short) + 6)


def test_choosing_and_gaps() -> None:
    c = content("x")
    a, b, over = Match(0, 5, c), Match(8, 10, c), Match(4, 9, c)
    assert longest_first([a, b, over]) == [a, b]
    assert longest_first([over, a]) == [a] or longest_first([over, a]) == [over]
    assert longest_first([over], [b]) == [b]
    assert longest_first([], [b, a]) == [a, b]
    assert gaps(0, 12, [a, b]) == [(5, 8), (10, 12)]
    assert gaps(0, 10, []) == [(0, 10)] and gaps(0, 5, [a]) == []


def test_repetitive_text_is_bounded() -> None:
    known = index(*(content("a" * (MIN_CHARACTERS + i)) for i in range(500)))
    text = "a " + "a" * 20_000
    started = time.perf_counter()
    found(known, text)
    known.find_parts("\n" * 20_000 + text, 0, 40_000)
    assert time.perf_counter() - started < 2


def test_contents_that_start_alike_are_told_apart() -> None:
    texts = [f"The answer to question number {i} is as follows: it depends on {i * i} things." for i in range(250)]
    known = index(*map(content, texts))
    assert {core for _, _, core in found(known, "\n".join(f"{i} {t}" for i, t in enumerate(texts)))} == set(texts)


def test_newest_of_many_messages_with_a_line_in_common() -> None:
    known = index(*(content(f"{DOC}\n{i}") for i in range(2 * MAX_ALIKE)))
    assert max(map(len, known._lines.values())) == MAX_ALIKE
    (part,) = known.find_parts(f"{DOC}\n{2 * MAX_ALIKE - 1}", 0, len(DOC) + 4)
    assert part.end == len(DOC) + 4


def test_time_grows_with_the_text_not_with_the_contents() -> None:
    rnd = random.Random(0)
    words = ["".join(rnd.choice("abcdefghijklm") for _ in range(rnd.randint(2, 9))) for _ in range(500)]

    def text(n: int) -> str:
        return " ".join(rnd.choice(words) for _ in range(n))

    haystack = text(3_000)
    few, many = (index(*(content(text(40)) for _ in range(n))) for n in (5, 500))

    def cost(where: ContentIndex) -> float:
        times = []
        for _ in range(7):
            started = time.perf_counter()
            found(where, haystack)
            times.append(time.perf_counter() - started)
        return min(times)

    assert cost(many) < 10 * cost(few) + 1e-3
