"""Encodes the text between contents: template text, with whatever data stands in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcomm_integrations.prompts.codec import Codec, Ids, Offsets, Span


@dataclass(frozen=True)
class Run:
    """Token ids of a text, with their character spans if they were asked for and the tokenizer can tell."""

    ids: Ids
    offsets: Offsets | None = None


def encode_run(
    codec: Codec, text: str, *, data: Sequence[Span] = (), at_start: bool = True, offsets: bool = False
) -> Run:
    """Encode ``text`` as the model's tokenizer would, except that control tokens within ``data`` stay text.

    Args:
        codec: the tokenizer.
        text: a stretch of a rendered prompt.
        data: ``[start, end)`` spans that are known to be data, characters.
        at_start: whether the prompt starts with this stretch (else no space may be put before it).
        offsets: whether to find out the tokens' character spans.
    """
    genuine = [
        found
        for found in codec.control_pattern.finditer(text)
        if not any(start < found.end() and found.start() < end for start, end in data)
    ]
    head = 0 if at_start or not codec.adds_prefix else genuine[0].start() if genuine else len(text)
    pieces = [(0, head, "plain"), (head, len(text), "whole")]
    run = _encode(codec, text, pieces, offsets)
    if sum(i in codec.control_ids for i in run.ids) == len(genuine):
        return run
    return _encode(codec, text, _strict_pieces(codec, text, [found.span() for found in genuine], at_start), offsets)


def _strict_pieces(codec: Codec, text: str, genuine: Sequence[Span], at_start: bool) -> list[tuple[int, int, str]]:
    """Genuine control tokens one by one, and everything between them as plain text."""
    pieces: list[tuple[int, int, str]] = []
    at, kind = 0, "prefixed" if at_start else "plain"
    for start, end in genuine:
        token = codec.control[text[start:end]]
        stop = len(text[:start].rstrip()) if token.lstrip else start
        pieces += [(at, max(at, stop), kind), (start, end, "control")]
        at, kind = end, "prefixed"
        if token.rstrip:
            at = len(text) - len(text[end:].lstrip())
    return [*pieces, (at, len(text), kind)]


def _encode(codec: Codec, text: str, pieces: Sequence[tuple[int, int, str]], offsets: bool) -> Run:
    ids: list[int] = []
    places: list[Span] | None = [] if offsets else None
    for start, end, kind in pieces:
        if start >= end:
            continue
        piece = text[start:end]
        if kind == "whole":
            got, where = codec.whole_offsets(piece) if places is not None else (codec.whole(piece), None)
        else:
            control = kind == "control"
            got = (codec.control[piece].id,) if control else codec.plain(piece, prefix=kind == "prefixed")
            where = ((0, end - start),) * len(got)
        ids += got
        if where is None:
            places = None
        elif places is not None:
            places += [(start + first, start + last) for first, last in where]
    return Run(tuple(ids), None if places is None else tuple(places))
