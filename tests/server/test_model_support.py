"""What is said of a model before it is loaded agrees with what the connector says of the loaded one."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from kvcomm_integrations.connector.compat import unsupported_reason
from kvcomm_integrations.engines.model_support import read_config, unsupported_model, unsupported_option
from kvcomm_integrations.errors import UnsupportedModelError
from kvcomm_integrations.reuse.rope import Rope
from kvcomm_integrations.serve.arguments import given
from tests.connector.standins import BLOCK, cache_config, engine_config, spec

COMMON: Any = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float32}
SMALL = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}
EXAMPLES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {}, ""),
    ("qwen2", {}, ""),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0}, "128 tokens"),
    ("qwen3", {}, ""),
    ("mistral", {"sliding_window": None}, ""),
    ("mistral", {"sliding_window": 4096}, "4096 tokens"),
    ("phi3", {"sliding_window": 2047, "pad_token_id": 0}, "2047 tokens"),
    ("gemma2", {}, "4096 tokens"),
    ("gpt_oss", {}, "128 tokens"),
    ("deepseek_v3", {}, "MLA"),
    ("qwen3_next", {}, "hybrid attention"),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 2}, "hybrid attention"),
    ("granitemoehybrid", {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"}, ""),
    ("falcon_h1", {}, "state-space"),
    ("mamba", {}, "state-space"),
    ("falcon", {"alibi": True}, "ALiBi"),
    ("smollm3", {}, "without rotary positions"),
    ("qwen2_vl_text", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, "M-RoPE"),
]


def caches(config: Any) -> Any:
    """The cache's groups as vLLM forms them: one for each kind of layer."""
    if getattr(config, "kv_lora_rank", None):
        return cache_config(MLAAttentionSpec(**COMMON))
    state = MambaSpec(block_size=BLOCK, shapes=((4,),), dtypes=(torch.float32,))
    kinds = {
        "sliding_attention": SlidingWindowSpec(**COMMON, sliding_window=128),
        "chunked_attention": ChunkedLocalAttentionSpec(**COMMON, attention_chunk_size=64),
        "linear_attention": state,
        "mamba": state,
    }
    layers = set(getattr(config, "layer_types", None) or ())
    if config.model_type == "falcon_h1":
        layers = {"mamba", "full_attention"}
    if config.model_type == "mamba":
        layers = {"mamba"}
    return cache_config(*(kinds.get(kind, spec()) for kind in sorted(layers)))


@pytest.mark.parametrize(("kind", "fields", "reason"), EXAMPLES, ids=[f"{e[0]}-{e[2]}" for e in EXAMPLES])
def test_the_forecast_is_what_the_connector_says(
    kind: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(kind, **(SMALL | fields))
    config.save_pretrained(tmp_path)
    read = read_config(str(tmp_path))
    assert read is not None
    told = unsupported_model(read)
    assert reason in told and bool(told) == bool(reason)
    refusal = unsupported_reason(engine_config(model_config=SimpleNamespace(hf_text_config=config)), caches(config))
    try:
        Rope.from_hf_config(config)
    except UnsupportedModelError as error:
        refusal = refusal or str(error)
    assert bool(refusal) == bool(told), refusal


def test_a_window_that_is_switched_off_is_none() -> None:
    config = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}
    assert "512" in unsupported_model(config)
    assert unsupported_model(config, sliding_window=False) == ""


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        (["--kv-cache-dtype", "fp8"], {"cache_config": SimpleNamespace(cache_dtype="fp8")}),
        (["--kv-cache-dtype=bfloat16"], {"cache_config": SimpleNamespace(cache_dtype="bfloat16")}),
        (["--speculative_config", "{}"], {"speculative_config": SimpleNamespace()}),
        (["--decode-context-parallel-size", "2"], {"parallel_config": SimpleNamespace(decode_context_parallel_size=2)}),
        (["--decode-context-parallel-size", "1"], {"parallel_config": SimpleNamespace(decode_context_parallel_size=1)}),
        (["--max-model-len", "64"], {}),
    ],
)
def test_options_that_switch_reuse_off(options: list[str], engine: dict[str, Any]) -> None:
    told = unsupported_option(partial(given, options))
    assert told == (unsupported_reason(engine_config(**engine), cache_config()) or "")


def test_a_hub_id_is_read_from_the_local_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert read_config("someone/some-model") is None
    assert read_config("no hub id at all") is None
    snapshot = tmp_path / "models--someone--some-model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"sliding_window": 8}))
    refs = tmp_path / "models--someone--some-model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert read_config("someone/some-model") == {"sliding_window": 8}
