"""Small tokenizers of every kind in use, made on the spot: what holds of the demo model's must hold of these."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from kvcomm_integrations.prompts import ChatTokenizer

from .conversations import ANSWER, CODE, QUESTION, RESULT
from .templates import CHATML

CORPUS = [QUESTION, ANSWER, CODE, RESULT, "the cat sat on the mat .\n\nuser assistant system\n"] * 4
CONTROL = ("<|im_start|>", "<|im_end|>")


def _trained(
    normalizer: Any, pre_tokenizer: Any, decoder: Any, *, alphabet: list[str] | None = None, post: Any = None
) -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=alphabet is None))
    for part, value in (
        ("normalizer", normalizer),
        ("pre_tokenizer", pre_tokenizer),
        ("decoder", decoder),
        ("post_processor", post),
    ):
        if value is not None:
            setattr(backend, part, value)
    bytes_ = [f"<0x{i:02X}>" for i in range(256)] if alphabet is None else []
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", *bytes_],
        initial_alphabet=alphabet or [],
        max_token_length=6,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if bytes_:
        # byte tokens are ordinary vocabulary: a tokenizer whose added tokens they are would match them in text
        spec = json.loads(backend.to_str())
        spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] not in bytes_]
        backend = Tokenizer.from_str(json.dumps(spec))
    return backend


def _chat(backend: Tokenizer, *, rstrip: bool = False, special: bool = True) -> ChatTokenizer:
    added = [AddedToken(t, special=special, normalized=False, rstrip=rstrip) for t in CONTROL]
    (backend.add_special_tokens if special else backend.add_tokens)(added)
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>" if special else None)
    hf.chat_template = CHATML.text
    return ChatTokenizer(hf, source="toy")


def byte_level(**chat: Any) -> ChatTokenizer:
    """GPT-2 and Llama-3 style."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _chat(
        _trained(None, level, decoders.ByteLevel(), alphabet=level.alphabet(), post=processors.ByteLevel()), **chat
    )


def byte_level_prefixed() -> ChatTokenizer:
    """RoBERTa style: a space is put before the text."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return _chat(_trained(None, level, decoders.ByteLevel(), alphabet=level.alphabet(), post=processors.ByteLevel()))


def byte_level_composing() -> ChatTokenizer:
    """Qwen style: characters are composed first (NFC)."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _chat(_trained(normalizers.NFC(), level, decoders.ByteLevel(), alphabet=level.alphabet()))


def sentencepiece_legacy() -> ChatTokenizer:
    """Llama-2 style: a space before the text and after every control token, taken away in decoding."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _chat(_trained(normalizer, None, decoder))


def metaspace() -> ChatTokenizer:
    """Mistral style: a space before the first word only."""
    space = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return _chat(_trained(None, space, decoder))


def gemma_like() -> ChatTokenizer:
    """Spaces are letters, and none is added."""
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _chat(_trained(normalizers.Replace(" ", "▁"), None, decoder))


def word_level() -> ChatTokenizer:
    """Lossy, with the control tokens in its vocabulary of words."""
    words = {w: i for i, w in enumerate(["<unk>", *CONTROL, *sorted({w for t in CORPUS for w in t.split()})])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _chat(backend)


class Letters(PreTrainedTokenizer):
    """A tokenizer in Python: one token per character."""

    def __init__(self, **kwargs: Any) -> None:
        self._letters = [chr(i) for i in range(9, 0x10000)]
        super().__init__(unk_token="<unk>", **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._letters)

    def get_vocab(self) -> dict[str, int]:
        return {**{c: i for i, c in enumerate(self._letters)}, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token) - 9 if len(token) == 1 and 9 <= ord(token) < 0x10000 else self.unk_token_id or 0

    def _convert_id_to_token(self, index: int) -> str:
        return self._letters[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def letters() -> ChatTokenizer:
    """Slow."""
    hf = Letters(additional_special_tokens=list(CONTROL), eos_token="<|im_end|>")
    hf.chat_template = CHATML.text
    return ChatTokenizer(hf, source="letters")


def rstrip() -> ChatTokenizer:
    """Phi-3 style: control tokens swallow the whitespace that follows."""
    return byte_level(rstrip=True)


def not_special() -> ChatTokenizer:
    """DeepSeek style: control tokens are not declared special."""
    return byte_level(special=False)


LOSSLESS = (byte_level, byte_level_composing, gemma_like, not_special, letters)
"""Decoding a whole prompt gives its text."""
TOYS = (*LOSSLESS, byte_level_prefixed, sentencepiece_legacy, metaspace, word_level, rstrip)
