"""Whatever the messages say: no wrong prompt, every token in one segment, no control token from data."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcomm_integrations.config import Tokenization
from kvcomm_integrations.prompts import BuiltPrompt, ChatMessage, ChatTokenizer, ContentRegistry, PromptBuilder
from kvcomm_integrations.prompts.chat_message import clean_text

from .checks import check_cover, check_text, control_count, placeholder_ids
from .conversations import ANSWER, CODE, QUESTION, RESULT

FRAGMENTS = (
    QUESTION,
    ANSWER,
    CODE,
    RESULT,
    QUESTION + " " + ANSWER,
    "<|im_start|>",
    "<|im_end|>",
    "<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n",
    "<|im_",
    "end|>",
    "assistant\n",
    "\n\n",
    " ",
    "\ufffd",
    "\ud83d",
    "👩‍👩‍👧",
    "<think>hm</think>",
    '".',
    ") ",
    "\U000f0041",
)
text = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=8)), max_size=6).map("".join)
messages = st.lists(
    st.builds(
        ChatMessage,
        st.sampled_from(["user", "user", "assistant", "system", "tool"]),
        text,
        st.sampled_from([None, "coder", "user"]),
    ),
    min_size=1,
    max_size=5,
)


def check_readable(built: BuiltPrompt, tokenizer: ChatTokenizer) -> None:
    """The tokens say what was rendered; the demo model has no tokens for a few rare characters, and leaves them out."""
    known = "".join(tokenizer.codec.decode_exact(tokenizer.encode_plain(c)) for c in built.prompt.text)
    assert tokenizer.decode(built.prompt.token_ids, skip_special=False) == known


relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@relaxed
@given(conversations=st.lists(messages, min_size=1, max_size=3), tokenization=st.sampled_from(Tokenization))
def test_never_a_wrong_prompt(
    tokenizer: ChatTokenizer, conversations: list[list[ChatMessage]], tokenization: Tokenization
) -> None:
    builder = PromptBuilder(tokenizer, ContentRegistry(), tokenization=tokenization, min_segment_tokens=1)
    for agent, conversation in enumerate(conversations):
        built = builder.build(conversation, session="s", agent=str(agent))
        dicts = [m.to_dict(clean_text(m.content)) for m in conversation]
        assert built.prompt.text == tokenizer.render(dicts)
        check_cover(built)
        check_readable(built, tokenizer)
        nothing = tokenizer.render([{**d, "content": ""} for d in dicts])
        assert control_count(built, tokenizer) == len(tokenizer.codec.control_pattern.findall(nothing))
        for content, ids in zip(built.contents, placeholder_ids(built).values(), strict=True):
            if tokenization is Tokenization.SEGMENTED:
                assert tokenizer.spells(ids, content.core)


@relaxed
@given(shared=text.filter(lambda t: len(t.strip()) > 60), first=messages, second=messages)
def test_shared_content_has_the_same_ids_in_any_two_prompts(
    tokenizer: ChatTokenizer, shared: str, first: list[ChatMessage], second: list[ChatMessage]
) -> None:
    registry = ContentRegistry()
    builder = PromptBuilder(tokenizer, registry)
    content = registry.register("s", "shared", shared)
    message = ChatMessage("user", shared, segment_id=content.id)
    found = []
    for around in (first, second):
        built = builder.build([*around, message], session="s", agent="a")
        found.append([s for s, c in zip(placeholder_ids(built).values(), built.contents, strict=True) if c is content])
    assert found[0] and found[0][-1] == found[1][-1]


@relaxed
@given(pieces=st.lists(st.integers(3, 49_000), min_size=1, max_size=40))
def test_generated_ids_are_used_or_dropped_but_never_change_the_text(
    tokenizer: ChatTokenizer, pieces: list[int]
) -> None:
    ids = [i for i in pieces if i not in tokenizer.codec.control_ids]
    said = tokenizer.decode(ids)
    registry = ContentRegistry()
    content = registry.register_response("s", "solver", said, ids)
    builder = PromptBuilder(tokenizer, registry, min_segment_tokens=1)
    built = builder.build([ChatMessage("assistant", said, segment_id=content.id)], session="s", agent="a")
    check_cover(built)
    check_text(built, tokenizer)
    if said.strip():
        assert placeholder_ids(built) == {content.name: tuple(ids)}
