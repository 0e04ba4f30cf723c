"""A model's tokenizer and chat template behind one small interface."""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from kvcomm_integrations.errors import ConfigurationError, MissingDependencyError
from kvcomm_integrations.prompts.cache import BoundedCache
from kvcomm_integrations.prompts.chat_message import with_parsed_arguments
from kvcomm_integrations.prompts.codec import Codec, FastCodec, Ids, SlowCodec

_CACHE_CHARACTERS = 16 << 20


class ChatTokenizer:
    """A Hugging Face tokenizer with a chat template. Safe to use from several threads.

    ``encode`` never adds BOS or EOS: what a chat prompt starts with is the template's business, as in
    ``apply_chat_template``, so a BOS cannot be doubled.
    """

    def __init__(self, hf_tokenizer: Any, *, source: str = "", eos_token_ids: Sequence[int] = ()) -> None:
        """Args:
            hf_tokenizer: a ``PreTrainedTokenizerBase``.
            source: folder or hub id it came from, for error messages.
            eos_token_ids: further ids that end an answer, beside the tokenizer's own.

        Raises:
            ConfigurationError: the tokenizer has no chat template.
        """
        self.source = source or str(getattr(hf_tokenizer, "name_or_path", "")) or type(hf_tokenizer).__name__
        if not getattr(hf_tokenizer, "chat_template", None):
            raise ConfigurationError(
                f"the tokenizer of {self.source!r} has no chat template; use an instruction-tuned model, or put a "
                "chat_template.jinja into the model's folder"
            )
        self.hf = hf_tokenizer
        """The Hugging Face tokenizer itself."""
        self.codec: Codec = _codec(hf_tokenizer)
        self._extra_eos = tuple(eos_token_ids)
        self._encodings: BoundedCache[Ids] = BoundedCache(_CACHE_CHARACTERS)

    @classmethod
    def from_pretrained(cls, path_or_id: str | os.PathLike[str], *, chat_template: str | None = None) -> ChatTokenizer:
        """Load from a model's folder, or by hub id.

        Args:
            path_or_id: folder with tokenizer files, or a hub id.
            chat_template: Jinja text to use in place of the model's own.

        Raises:
            ConfigurationError: the folder is missing, holds no tokenizer, or there is no chat template.
            MissingDependencyError: ``transformers`` is not installed.
        """
        name = os.fspath(path_or_id)
        if _looks_local(name) and not Path(name).is_dir():
            raise ConfigurationError(f"model folder {name!r} does not exist; give one with a tokenizer, or a hub id")
        try:
            from transformers import AutoTokenizer
        except ModuleNotFoundError as err:
            raise MissingDependencyError(
                "loading a tokenizer needs transformers: pip install 'kvcomm-integrations[vllm]'", name="transformers"
            ) from err
        try:
            hf_tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, KeyError, json.JSONDecodeError) as err:
            raise ConfigurationError(f"no tokenizer could be loaded from {name!r}: {err}") from err
        if chat_template is not None:
            hf_tokenizer.chat_template = chat_template
        return cls(hf_tokenizer, source=name, eos_token_ids=_generation_eos(name))

    # --- tokens ----------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Token ids of ``text``, without BOS or EOS.

        Args:
            text: a rendered prompt, or a piece of content.
            allow_special: ``True`` for a prompt that a template has written: control tokens are recognised. ``False``
                for text from outside: whatever it says, no control token comes out, and it is encoded as in the
                middle of a prompt (no space is put before it).
        """
        return list(self.encode_whole(text) if allow_special else self.encode_plain(text))

    def encode_whole(self, text: str) -> Ids:
        """``encode(text, allow_special=True)``, cached."""
        return self._encodings.get(("whole", text), len(text), lambda: self.codec.whole(text))

    def encode_plain(self, text: str) -> Ids:
        """``encode(text, allow_special=False)``, cached."""
        return self._encodings.get(("plain", text), len(text), lambda: self.codec.plain(text))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``, as the model's tokenizer shows it; incomplete characters come out as U+FFFD."""
        return self.codec.decode(ids, skip_special=skip_special)

    def spells(self, ids: Sequence[int], text: str) -> bool:
        """Whether ``ids``, in the middle of a prompt, read exactly as ``text`` and hold no control token.

        ``text`` may hold what the tokenizer never writes as it stands: uncomposed characters if it composes them (NFC),
        and characters it has no tokens for.
        """
        if not self.codec.control_ids.isdisjoint(ids):
            return False
        read = self.codec.decode_exact(ids)
        if read == text:
            return True
        known = "".join(c if " " <= c <= "~" else self.codec.decode_exact(self.encode_plain(c)) for c in text)
        return read in (known, unicodedata.normalize("NFC", known))

    def slice(self, ids: Sequence[int], text: str, start: int, end: int) -> Ids | None:
        """The part of ``ids``, which spell ``text``, for ``text[start:end]``; ``None`` if a cut splits a token."""
        first, last = self._cut(ids, text, start), self._cut(ids, text, end)
        if first is None or last is None:
            return None
        part = tuple(ids[first:last])
        return part if self.spells(part, text[start:end]) else None

    def _cut(self, ids: Sequence[int], text: str, at: int) -> int | None:
        """Number of tokens that spell ``text[:at]``; ``None`` if ``at`` lies within one."""
        if at in (0, len(text)):
            return len(ids) if at == len(text) else 0
        count = bisect_left(range(len(ids)), at, key=lambda count: len(self.codec.decode_exact(ids[:count])))
        return count if self.codec.decode_exact(ids[:count]) == text[:at] else None

    def count(self, text: str) -> int:
        """Number of tokens of ``text`` as content of a message."""
        return len(self.encode_plain(text))

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the tokenizer's own and the generation config's, ascending."""
        own = self.hf.eos_token_id
        return tuple(sorted({*([own] if isinstance(own, int) else own or ()), *self._extra_eos}))

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included (one more than the highest id)."""
        return max(len(self.hf), 1 + max(self.hf.get_vocab().values(), default=-1))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of vocabulary, control tokens and chat template: equal where prompts come out equal."""
        digest = hashlib.blake2b(digest_size=16)
        for token, number in sorted(self.hf.get_vocab().items(), key=lambda item: (item[1], item[0])):
            digest.update(f"{number}\0{token}\0".encode("utf-8", "surrogatepass"))
        digest.update("\0".join(sorted(self.codec.control)).encode())
        digest.update(json.dumps(self.hf.chat_template, sort_keys=True).encode())
        return digest.hexdigest()

    # --- template --------------------------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt's text, equal to ``apply_chat_template(..., tokenize=False)``.

        Tool-call ``arguments`` that are JSON strings become objects first, as vLLM does.

        Raises:
            ConfigurationError: the chat template refuses these messages; carries the template's words.
        """
        from jinja2 import TemplateError

        try:
            return str(
                self.hf.apply_chat_template(
                    [with_parsed_arguments(message) for message in messages],
                    tools=[dict(tool) for tool in tools] if tools else None,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **template_kwargs,
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as err:
            roles = ", ".join(str(message.get("role")) for message in messages) or "none"
            raise ConfigurationError(
                f"the chat template of {self.source!r} refuses these messages (roles: {roles}): {err}"
            ) from err


def _codec(hf_tokenizer: Any) -> Codec:
    backend = getattr(hf_tokenizer, "backend_tokenizer", None)
    if backend is None:
        return SlowCodec(hf_tokenizer)
    return FastCodec(backend.to_str(), (hf_tokenizer.bos_token, hf_tokenizer.eos_token))


def _looks_local(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1 or os.path.isabs(name)


def _generation_eos(name: str) -> tuple[int, ...]:
    """Ids that the model's generation config names as ends; none if there is no such file."""
    from transformers.utils import cached_file

    try:
        path = cached_file(name, "generation_config.json", _raise_exceptions_for_missing_entries=False)
        found = json.loads(Path(path).read_text(encoding="utf-8")).get("eos_token_id") if path else None
    except (OSError, ValueError):
        return ()
    return (found,) if isinstance(found, int) else tuple(found or ())
