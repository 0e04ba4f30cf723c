"""Text to token ids and back, with one tokenizer.

Three ways to encode are kept apart because they answer different questions:

* ``whole``: as the model's tokenizer encodes a rendered prompt (control tokens are recognised, BOS is never added).
* ``plain``: text from outside, which can never become a control token, encoded as in the middle of a prompt: without
  the space that SentencePiece-like tokenizers put before a text.
* ``plain`` with ``prefix=True``: the same, with that space.

Each has its own private copy of the Rust tokenizer, because the switch between them is state on the tokenizer and
changing it while another thread encodes is an error.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Ids = tuple[int, ...]
Span = tuple[int, int]
Offsets = tuple[Span, ...]
_Changes = Mapping[str, Mapping[str, Any] | None]
"""Kind of a tokenizer's step to settings it gets; ``None`` drops the step."""

_CONTROL_SHAPE = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)


@dataclass(frozen=True)
class ControlToken:
    """A token that steers the model: special, or written like ``<|...|>``."""

    text: str
    id: int
    lstrip: bool = False
    """The tokenizer swallows the whitespace before it."""
    rstrip: bool = False
    """The tokenizer swallows the whitespace after it."""


class Codec(ABC):
    """Encodes and decodes for one tokenizer. Safe to use from several threads."""

    control: Mapping[str, ControlToken]
    """Every control token by its text."""
    adds_prefix: bool
    """Whether ``whole`` puts a space before a text that does not start with a control token."""

    @abstractmethod
    def whole(self, text: str) -> Ids:
        """Ids as the model's tokenizer gives them, without BOS or EOS of its own."""

    @abstractmethod
    def whole_offsets(self, text: str) -> tuple[Ids, Offsets | None]:
        """As ``whole``, with each token's character span if this tokenizer can tell."""

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Text for display, as the model's tokenizer decodes it."""

    @abstractmethod
    def decode_exact(self, ids: Sequence[int]) -> str:
        """Text of a piece from the middle of a prompt: a leading space is kept, control tokens are shown."""

    @abstractmethod
    def _plain(self, text: str, prefix: bool) -> Ids: ...

    def plain(self, text: str, *, prefix: bool = False) -> Ids:
        """Ids of untrusted text; contains no control token whatever the text says."""
        ids = self._plain(text, prefix)
        if self.control_ids.isdisjoint(ids):
            return ids
        # Some models look whole words up in the vocabulary, control tokens included: break those words.
        out: list[int] = []
        at = 0
        for found in self.control_pattern.finditer(text):
            out += self._plain(text[at : found.start() + 1], prefix and at == 0)
            at = found.start() + 1
        out += self._plain(text[at:], prefix and at == 0)
        return tuple(i for i in out if i not in self.control_ids)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids of all control tokens."""
        return frozenset(token.id for token in self.control.values())

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Finds control tokens in text, longest first as tokenizers do; matches nothing if there are none."""
        words = sorted(self.control, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, words)) if words else r"(?!)")


class FastCodec(Codec):
    """Codec over the Rust tokenizer that Hugging Face calls *fast*."""

    def __init__(self, spec: str, ends: Iterable[str | None] = ()) -> None:
        """Args:
        spec: the tokenizer as JSON (``tokenizer.json``).
        ends: BOS and EOS. Some tokenizers use one of them as their unknown token too; then it is control all the same.
        """
        data = json.loads(spec)
        unk = _unknown(data["model"])
        self.control = _controls(data["added_tokens"], None if unk in ends else unk)
        for token in data["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self.control
        # Offsets include a token's leading space.
        ordinary = _rewritten(data, ("pre_tokenizer", "post_processor"), {"ByteLevel": {"trim_offsets": False}})
        bare = _without_prefix(ordinary)
        self.adds_prefix = bare != ordinary
        ordinary_spec = json.dumps(ordinary)
        bare_spec = json.dumps(bare) if self.adds_prefix else ordinary_spec
        self._whole = _load(ordinary_spec, split=False)
        self._bare = _load(bare_spec, split=True)
        self._prefixed = _load(ordinary_spec, split=True) if self.adds_prefix else self._bare

    def whole(self, text: str) -> Ids:
        return tuple(self._whole.encode(text, add_special_tokens=False).ids)

    def whole_offsets(self, text: str) -> tuple[Ids, Offsets | None]:
        done = self._whole.encode(text, add_special_tokens=False)
        return tuple(done.ids), tuple(done.offsets)

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return str(self._whole.decode(list(ids), skip_special_tokens=skip_special))

    def decode_exact(self, ids: Sequence[int]) -> str:
        return str(self._bare.decode(list(ids), skip_special_tokens=False))

    def _plain(self, text: str, prefix: bool) -> Ids:
        backend = self._prefixed if prefix else self._bare
        return tuple(backend.encode(text, add_special_tokens=False).ids)


class SlowCodec(Codec):
    """Codec over a tokenizer written in Python: no offsets, and no knowledge of its prefix space."""

    adds_prefix = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = [
            {"content": t.content, "id": i, "special": t.special, "lstrip": t.lstrip, "rstrip": t.rstrip}
            for i, t in tokenizer.added_tokens_decoder.items()
        ]
        unk = tokenizer.unk_token
        self.control = _controls(added, None if unk in (tokenizer.bos_token, tokenizer.eos_token) else unk)

    def whole(self, text: str) -> Ids:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def whole_offsets(self, text: str) -> tuple[Ids, Offsets | None]:
        return self.whole(text), None

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def decode_exact(self, ids: Sequence[int]) -> str:
        decode = self._tokenizer.decode
        return str(decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _plain(self, text: str, prefix: bool) -> Ids:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def _controls(added: Iterable[Mapping[str, Any]], unk: str | None) -> dict[str, ControlToken]:
    """Control tokens among a tokenizer's added ones (``content``, ``id``, ``special``, ``lstrip``, ``rstrip``)."""
    return {
        t["content"]: ControlToken(t["content"], t["id"], t["lstrip"], t["rstrip"])
        for t in added
        if t["content"] and t["content"] != unk and (t["special"] or _CONTROL_SHAPE.fullmatch(t["content"]))
    }


def _unknown(model: Mapping[str, Any]) -> str | None:
    """The token that may stand for any character; it steers nothing, so it is not control."""
    if model.get("unk_id") is not None:
        return str(model["vocab"][model["unk_id"]][0])
    return model.get("unk_token")


def _load(spec: str, *, split: bool) -> Any:
    """A Rust tokenizer that never truncates or pads; with ``split`` it takes special tokens for ordinary text."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(spec)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = split
    return backend


def _without_prefix(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer, which neither puts a space before a text nor takes one away when it decodes."""
    never = {"Metaspace": {"prepend_scheme": "never"}}
    data = _rewritten(data, ("normalizer",), {"Prepend": None})
    data = _rewritten(data, ("pre_tokenizer",), {**never, "ByteLevel": {"add_prefix_space": False}})
    return _rewritten(data, ("decoder",), {**never, "Strip": None})


def _rewritten(data: Mapping[str, Any], parts: Iterable[str], changes: _Changes) -> dict[str, Any]:
    """The same tokenizer with other settings for some kinds of step in some of its parts."""
    return {**data, **{part: _changed(data.get(part), changes) for part in parts}}


def _changed(step: Any, changes: _Changes) -> Any:
    """One step or a sequence of steps with ``changes`` made; ``None`` if nothing is left."""
    if step is None or (step["type"] in changes and changes[step["type"]] is None):
        return None
    if step["type"] != "Sequence":
        return {**step, **(changes.get(step["type"]) or {})}
    key = next(k for k, v in step.items() if isinstance(v, list))
    kept = [new for new in (_changed(inner, changes) for inner in step[key]) if new is not None]
    return {**step, key: kept} if kept else None
