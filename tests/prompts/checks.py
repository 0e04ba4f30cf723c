"""What must hold of every prompt, however it came about."""

from __future__ import annotations

from itertools import pairwise

from kvcomm_integrations.prompts import BuiltPrompt, ChatTokenizer
from kvcomm_integrations.wire import SegmentKind


def check_cover(built: BuiltPrompt) -> None:
    """Segments cover every token exactly once, in order; names are there and unique; contents align."""
    at = 0
    for segment in built.prompt.segments:
        assert segment.start == at and segment.end > at
        at = segment.end
    assert at == len(built.prompt.token_ids)
    names = [segment.name for segment in built.placeholders]
    assert all(names) and len(set(names)) == len(names)
    assert len(built.contents) == len(names)
    for name, content in zip(names, built.contents, strict=True):
        assert name.partition("#")[0] == content.name.partition("#")[0]
    kinds = [segment.kind for segment in built.prompt.segments]
    assert (SegmentKind.FIXED, SegmentKind.FIXED) not in list(pairwise(kinds))


def check_text(built: BuiltPrompt, tokenizer: ChatTokenizer) -> None:
    """The tokens say what was rendered, and nothing else."""
    assert tokenizer.decode(built.prompt.token_ids, skip_special=False) == built.prompt.text


def check_labels(built: BuiltPrompt, tokenizer: ChatTokenizer) -> None:
    """Every placeholder says exactly what the content it is labelled with says."""
    for segment, content in zip(built.placeholders, built.contents, strict=True):
        said = tokenizer.decode(built.prompt.token_ids[segment.start : segment.end], skip_special=False)
        assert said in (content.text, content.core)


def placeholder_ids(built: BuiltPrompt) -> dict[str, tuple[int, ...]]:
    """Token ids of each placeholder by name."""
    return {s.name: built.prompt.token_ids[s.start : s.end] for s in built.placeholders}


def control_count(built: BuiltPrompt, tokenizer: ChatTokenizer) -> int:
    """Number of control tokens in the prompt."""
    return sum(i in tokenizer.codec.control_ids for i in built.prompt.token_ids)
