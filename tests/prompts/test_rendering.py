from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from kvcomm_integrations.prompts.cache import BoundedCache
from kvcomm_integrations.prompts.rendering import TemplateRefusal, locate
from kvcomm_integrations.prompts.shielding import Shield

CONTENTS = [" one two ", "three", "four\nfive six"]
SPANS = [[(1, 4), (5, 8)], [(0, 5)], [(5, 9)]]


def lines(change: Callable[[int, str], str] = lambda i, c: c) -> Callable[[Sequence[str]], str]:
    return lambda contents: "".join(f"<{i}>{change(i, c)}\n" for i, c in enumerate(contents))


def located(render: Callable[[Sequence[str]], str]) -> list[str]:
    text = render(CONTENTS)
    places = locate(text, CONTENTS, SPANS, render)
    assert all(a.end <= b.start for a, b in pairwise(places))
    for p in places:
        assert text[p.start : p.end] == CONTENTS[p.message][slice(*SPANS[p.message][p.span])]
    return [text[p.start : p.end] for p in places]


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (lambda i, c: c, ["one", "two", "three", "five"]),
        (lambda i, c: c.strip(), ["one", "two", "three", "five"]),
        (lambda i, c: "", []),
        (lambda i, c: c + c if i == 1 else c, ["one", "two", "three", "three", "five"]),
        (lambda i, c: c.upper(), []),
        (lambda i, c: c[:5] if i == 0 else c, ["three", "five"]),
        (lambda i, c: str(len(c)) + c if i == 2 else c, ["one", "two", "three"]),
        (lambda i, c: c.replace("h", "H"), ["one", "two", "five"]),
        (lambda i, c: "x" if c == "three" else c, ["one", "two", "five"]),
    ],
)
def test_what_templates_do(change: Callable[[int, str], str], want: list[str]) -> None:
    assert located(lines(change)) == want


def test_template_that_refuses_some_brackets() -> None:
    plain = lines()

    def render(contents: Sequence[str]) -> str:
        if contents[1] != "three":
            raise TemplateRefusal
        return plain(contents)

    assert located(render) == ["one", "two", "five"]


def test_messages_are_tried_in_halves() -> None:
    contents = [f"word{i}" for i in range(64)]
    calls = 0

    def render(texts: Sequence[str]) -> str:
        nonlocal calls
        calls += 1
        return "".join(t.upper() if i == 40 else t for i, t in enumerate(texts))

    places = locate(render(contents), contents, [[(0, len(c))] for c in contents], render)
    assert {p.message for p in places} == set(range(64)) - {40}
    assert calls < 20


def test_nothing_to_locate() -> None:
    assert locate("text", ["a"], [[]], lambda c: pytest.fail("rendered for nothing")) == []


PATTERN = re.compile(r"<\|end\|>|</s>")


def test_shield_covers_and_uncovers() -> None:
    data = {"a<|end|>": ["x</s>y", 3, None, ("<|end|>",)]}
    shield = Shield.for_data(PATTERN, [data])
    assert shield is not None
    covered = shield.cover(data)
    assert not PATTERN.search(str(covered)) and covered["a" + shield.cover("<|end|>")][1:3] == [3, None]
    text, spans = shield.uncover("<|end|>" + covered["a" + shield.cover("<|end|>")][0] + "</s>")
    assert text == "<|end|>x</s>y</s>" and spans == ((8, 12),)
    assert Shield.for_data(PATTERN, ["harmless", {"x": 1}]) is None


def test_shield_avoids_characters_of_the_data() -> None:
    text = "</s> " + "".join(chr(0xF0000 + ord(c)) for c in "</s>A")
    shield = Shield.for_data(PATTERN, [text])
    assert shield is not None and shield.uncover(shield.cover(text)) == (text, ((0, 4),))


def test_cache_is_bounded() -> None:
    cache: BoundedCache[int] = BoundedCache(10)
    for i in range(20):
        assert cache.get(i, 3, lambda i=i: i) == i
    assert len(cache) == 3 and cache.weight == 9
    assert cache.get(19, 3, lambda: pytest.fail("held")) == 19
    assert cache.get("heavy", 11, lambda: 1) == 1 and len(cache) == 3
