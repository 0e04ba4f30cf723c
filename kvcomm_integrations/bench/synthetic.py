"""A deep and narrow model with random weights, for contexts and depths that a real one does not allow on a CPU.

Its answers mean nothing, and corrections learned on it are worth nothing; times and token counts are real.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from kvcomm_integrations.demo_model import TOKENIZER_FILES
from kvcomm_integrations.errors import ConfigurationError

HEAD_DIM = 64
LONGEST = 1 << 17


@contextmanager
def synthetic_model(shape: str, tokenizer_of: str | Path) -> Iterator[str]:
    """A folder with a random Llama, gone after the block.

    Args:
        shape: ``LAYERSxHIDDEN``, such as ``60x256``; hidden sizes are multiples of 128 (two heads share one KV head).
        tokenizer_of: folder of the model whose tokenizer it takes.

    Raises:
        ConfigurationError: the shape cannot be read.
    """
    match = re.fullmatch(r"(\d+)x(\d+)", shape)
    layers, hidden = map(int, match.groups()) if match else (0, 0)
    if layers < 1 or hidden < 1 or hidden % (2 * HEAD_DIM):
        raise ConfigurationError(f"{shape!r} is not LAYERSxHIDDEN with a hidden size of 128, 256, 384, ...")
    real = AutoConfig.from_pretrained(tokenizer_of).get_text_config()
    config = LlamaConfig(
        **{name: getattr(real, name) for name in ("vocab_size", "bos_token_id", "eos_token_id")},
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=hidden // HEAD_DIM // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
    )
    with TemporaryDirectory(prefix="kvcomm-synthetic-", ignore_cleanup_errors=True) as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
        for path in filter(Path.exists, (Path(tokenizer_of) / name for name in TOKENIZER_FILES)):
            shutil.copy(path, folder)
        yield folder
