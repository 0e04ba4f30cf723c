from __future__ import annotations

import copy
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.prompts import ChatTokenizer

from .conftest import reading
from .conversations import ANSWER, CALL, CODE, QUESTION, TOOLS
from .templates import LLAMA3, QWEN25


def test_render_is_apply_chat_template(tokenizer: ChatTokenizer) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    for generation in (True, False):
        want = tokenizer.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        assert tokenizer.render(messages, add_generation_prompt=generation) == want


@pytest.mark.parametrize("arguments", ['{"where": "yard"}', {"where": "yard"}])
def test_tool_call_arguments_become_objects(tokenizer: ChatTokenizer, arguments: object) -> None:
    call = {**CALL, "function": {"name": "count_hens", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = reading(tokenizer, QWEN25.text).render([message], tools=TOOLS)
    assert '{"name": "count_hens", "arguments": {"where": "yard"}}' in text
    assert call["function"]["arguments"] is arguments


@pytest.mark.parametrize(("arguments", "shown"), [("", "{}"), ("not json", '"not json"')])
def test_tool_call_arguments_that_are_no_json(tokenizer: ChatTokenizer, arguments: str, shown: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert f'"arguments": {shown}' in reading(tokenizer, QWEN25.text).render([message])


def test_encode_trusted_and_untrusted(tokenizer: ChatTokenizer) -> None:
    text = f"{QUESTION}<|im_end|>"
    end = tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.encode(text, allow_special=True)[-1] == end
    assert end not in tokenizer.encode(text, allow_special=False)
    for allow in (True, False):
        assert tokenizer.decode(tokenizer.encode(text, allow_special=allow), skip_special=False) == text
    assert tokenizer.decode(tokenizer.encode(text, allow_special=True)) == QUESTION
    assert tokenizer.count(QUESTION) == len(tokenizer.encode(QUESTION, allow_special=False))


def test_encode_is_not_changed_by_using_the_hf_tokenizer(tokenizer: ChatTokenizer) -> None:
    before = tokenizer.codec.whole(QUESTION * 50)
    tokenizer.hf(QUESTION * 50, truncation=True, max_length=5, padding="max_length", split_special_tokens=True)
    assert tokenizer.codec.whole(QUESTION * 50) == before
    assert tokenizer.codec.whole("<|im_end|>") == (tokenizer.hf.convert_tokens_to_ids("<|im_end|>"),)


def test_threads_agree(tokenizer: ChatTokenizer) -> None:
    texts = [f"{i} {CODE} <|im_end|> {i}" for i in range(40)]
    want = [(tokenizer.codec.whole(t), tokenizer.codec.plain(t)) for t in texts]
    got: list[list[object]] = []

    def work() -> None:
        got.append([(tokenizer.encode_whole(t), tokenizer.encode_plain(t)) for t in texts])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [want] * 8


def test_no_bos_of_its_own(tokenizer: ChatTokenizer) -> None:
    hf = copy.deepcopy(tokenizer.hf)
    hf.add_tokens(["<|begin_of_text|>", "<|eot_id|>"], special_tokens=True)
    hf.bos_token = "<|begin_of_text|>"
    hf.chat_template = LLAMA3.with_ends()
    other = ChatTokenizer(hf)
    text = other.render([{"role": "user", "content": "x"}])
    assert other.encode(text, allow_special=True).count(hf.bos_token_id) == 1


def test_identity(tokenizer: ChatTokenizer, demo_model: Path) -> None:
    assert tokenizer.hf.eos_token_id in tokenizer.eos_token_ids
    assert tokenizer.eos_token_ids == tuple(sorted(set(tokenizer.eos_token_ids)))
    assert tokenizer.vocab_size > max(tokenizer.codec.control_ids)
    assert tokenizer.fingerprint == ChatTokenizer.from_pretrained(demo_model).fingerprint
    assert len(tokenizer.fingerprint) == 32
    changed = copy.copy(reading(tokenizer, "{{ messages[0].content }}"))
    changed.__dict__.pop("fingerprint", None)
    assert changed.fingerprint != tokenizer.fingerprint


def test_further_ends_come_from_the_generation_config(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    tokenizer.hf.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert ChatTokenizer.from_pretrained(tmp_path).eos_token_ids == tuple(sorted({0, 7, tokenizer.hf.eos_token_id}))
    (tmp_path / "generation_config.json").write_text("{")
    assert ChatTokenizer.from_pretrained(tmp_path).eos_token_ids == (tokenizer.hf.eos_token_id,)


def test_missing_folder_and_template(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        ChatTokenizer.from_pretrained(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match="no tokenizer"):
        ChatTokenizer.from_pretrained(tmp_path)
    hf = copy.copy(tokenizer.hf)
    hf.chat_template = None
    with pytest.raises(ConfigurationError, match="chat template"):
        ChatTokenizer(hf, source="a-base-model")
    hf.save_pretrained(tmp_path)
    assert ChatTokenizer.from_pretrained(tmp_path, chat_template="x").render([{"role": "user", "content": ""}]) == "x"


def test_empty_conversation(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(ConfigurationError, match="roles: none"):
        tokenizer.render([])


def test_spells_and_slice(tokenizer: ChatTokenizer) -> None:
    text = f"\n\n{ANSWER}\n\n"
    ids = tokenizer.encode(text, allow_special=False)
    assert tokenizer.spells(ids, text) and not tokenizer.spells(ids, ANSWER)
    core = tokenizer.slice(ids, text, 2, len(text) - 2)
    assert core is not None and tokenizer.decode(core) == ANSWER and core == tuple(ids[2:-1])
    assert tokenizer.slice(ids, text, 0, len(text)) == tuple(ids)
    assert tokenizer.slice(ids, text, 0, len(text) - 1) is None  # the last "\n\n" is one token
    assert tokenizer.slice(ids, text, 0, 0) == ()
    assert not tokenizer.spells([*ids, tokenizer.eos_token_ids[0]], text)


def test_half_an_emoji(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("so \U0001f600", allow_special=False)
    cut = ids[:-1]
    text = tokenizer.decode(cut)
    assert text.endswith("\ufffd") and tokenizer.spells(cut, text)


def test_importing_is_cheap() -> None:
    code = (
        "import sys, kvcomm_integrations.prompts as p\n"
        "[getattr(p, name) for name in p.__all__]\n"
        "print([m for m in ('torch', 'vllm', 'transformers', 'tokenizers', 'langchain_core') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
