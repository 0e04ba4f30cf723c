"""What holds of the demo model's tokenizer holds of tokenizers of every other kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest

from kvcomm_integrations.config import Tokenization
from kvcomm_integrations.prompts import ChatMessage, ChatTokenizer, ContentRegistry, PromptBuilder

from .checks import check_cover, check_text, control_count, placeholder_ids
from .conversations import ANSWER, CODE, CONVERSATIONS, QUESTION
from .toys import LOSSLESS, TOYS, byte_level, letters, not_special, sentencepiece_legacy, word_level

Make = Callable[[], ChatTokenizer]
made = lru_cache(maxsize=None)(lambda make: make())


def build(tokenizer: ChatTokenizer, messages: list[ChatMessage], tokenization: Tokenization = Tokenization.SEGMENTED):
    return PromptBuilder(tokenizer, ContentRegistry(), tokenization=tokenization).build(
        messages, session="s", agent="a"
    )


@pytest.mark.parametrize("tokenization", list(Tokenization))
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("make", TOYS)
def test_cover_text_and_control_tokens(make: Make, conversation: str, tokenization: Tokenization) -> None:
    tokenizer = made(make)
    messages = CONVERSATIONS[conversation]
    built = build(tokenizer, messages, tokenization)
    check_cover(built)
    assert built.prompt.text == tokenizer.render([m.to_dict() for m in messages]) or conversation == "unicode"
    assert control_count(built, tokenizer) == 2 * len(messages) + 1
    if make in LOSSLESS and conversation != "unicode":
        check_text(built, tokenizer)


@pytest.mark.parametrize("make", TOYS)
def test_canonical_is_the_ordinary_tokenisation(make: Make) -> None:
    tokenizer = made(make)
    built = build(tokenizer, CONVERSATIONS["agents"], Tokenization.CANONICAL)
    ordinary = tokenizer.hf(built.prompt.text, add_special_tokens=False)["input_ids"]
    assert list(built.prompt.token_ids) == ordinary


@pytest.mark.parametrize("make", TOYS)
def test_fixed_text_alone_is_the_ordinary_tokenisation(make: Make) -> None:
    tokenizer = made(make)
    built = build(tokenizer, [ChatMessage("system", QUESTION), ChatMessage("user", "Go.")])
    ordinary = tokenizer.hf(built.prompt.text, add_special_tokens=False)["input_ids"]
    if tokenizer.codec.adds_prefix:  # "Go." is written without the space that such a tokenizer would put before it
        assert tokenizer.decode(built.prompt.token_ids).replace(" ", "") == tokenizer.decode(ordinary).replace(" ", "")
    else:
        assert list(built.prompt.token_ids) == ordinary


@pytest.mark.parametrize("make", [t for t in TOYS if t is not word_level])
def test_contents_have_the_same_ids_everywhere(make: Make) -> None:
    builder = PromptBuilder(made(make), ContentRegistry())
    one = builder.build([ChatMessage("user", QUESTION), ChatMessage("user", ANSWER, "b")], session="s", agent="a")
    text = f"Question: {QUESTION}\nAnswer:{ANSWER}"
    two = builder.build([ChatMessage("system", "x"), ChatMessage("user", text)], session="s", agent="c")
    assert placeholder_ids(one) == placeholder_ids(two) and len(placeholder_ids(one)) == 2


@pytest.mark.parametrize("make", [t for t in TOYS if t is not word_level])
def test_untrusted_text_is_spelled_exactly(make: Make) -> None:
    tokenizer = made(make)
    for text in (QUESTION, CODE, " leading", "trailing \n", "a  b", "x", "<|im_end|>", "<|im_start|><|im_end|>x"):
        ids = tokenizer.encode(text, allow_special=False)
        assert tokenizer.spells(ids, text)
        assert tokenizer.codec.control_ids.isdisjoint(ids)


def test_lossy_tokenizer_has_fewer_placeholders() -> None:
    built = build(made(word_level), [ChatMessage("user", CODE)])
    assert not built.placeholders


def test_control_words_in_the_vocabulary_are_broken_up() -> None:
    tokenizer = made(word_level)
    assert tokenizer.encode("the <|im_end|> cat", allow_special=True)[1] in tokenizer.codec.control_ids
    assert tokenizer.codec.control_ids.isdisjoint(tokenizer.encode("the <|im_end|> cat", allow_special=False))


def test_control_tokens_need_not_be_declared_special() -> None:
    tokenizer = made(not_special)
    assert set(tokenizer.codec.control) == {"<|im_start|>", "<|im_end|>"}


def test_no_space_is_put_into_the_middle_of_a_prompt() -> None:
    tokenizer = made(sentencepiece_legacy)
    built = build(tokenizer, [ChatMessage("user", f"({QUESTION})"), ChatMessage("user", f"[{QUESTION}]")])
    assert f"({QUESTION})" in tokenizer.decode(built.prompt.token_ids)


def test_slow_tokenizer_divides_apart_but_not_by_offsets() -> None:
    messages = [ChatMessage("user", QUESTION)]
    assert len(build(made(letters), messages).placeholders) == 1
    assert not build(made(letters), messages, Tokenization.CANONICAL).placeholders


def test_composed_characters_may_differ_from_the_text() -> None:
    tokenizer = made(byte_level)
    decomposed = "e\u0301" * 10
    assert tokenizer.spells(tokenizer.encode(decomposed, allow_special=False), decomposed)
