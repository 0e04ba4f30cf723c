"""Why a model would be served without reuse, as far as its ``config.json`` and vLLM's options tell.

It is a forecast, made without vLLM and before any weights are read. The connector decides once the model is loaded; a
test holds the two against each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PLAIN_CACHE_TYPES = (None, "", "auto", "float16", "bfloat16", "float32")
PARTIAL_ATTENTION = {"sliding_attention", "chunked_attention", "linear_attention", "mamba"}


def read_config(model: str, revision: str | None = None) -> dict[str, Any] | None:
    """A model's configuration, if it is on this machine.

    Args:
        model: folder or hub id; an id is looked up in the local cache of the hub only.
        revision: of the hub id.
    """
    try:
        found = json.loads(_config_file(model, revision).read_text(encoding="utf-8"))
    except (ImportError, OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _config_file(model: str, revision: str | None) -> Path:
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser() / "config.json"
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(path, str):
        raise FileNotFoundError(model)
    return Path(path)


def unsupported_model(config: Mapping[str, Any], *, sliding_window: bool = True) -> str:
    """Why KV of a model of this configuration cannot be reused; empty if nothing speaks against it.

    Args:
        config: content of ``config.json``.
        sliding_window: whether vLLM uses the model's sliding window (``--disable-sliding-window`` was not given).
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    if text.get("kv_lora_rank"):
        return "multi-head latent attention (MLA)"
    kinds = set(text.get("layer_types") or text.get("layers_block_type") or ())
    if not sliding_window:
        kinds = {"full_attention" if kind == "sliding_attention" else kind for kind in kinds}
    elif text.get("sliding_window") and text.get("use_sliding_window", True):
        return f"sliding window of {text['sliding_window']} tokens"
    if len(kinds) > 1 or kinds & PARTIAL_ATTENTION:
        return f"hybrid attention ({', '.join(sorted(kinds))})"
    if not kinds and any(name.startswith(("mamba_", "ssm_")) or name == "state_size" for name in text):
        return "state-space layers"
    if text.get("alibi"):
        return "ALiBi positions"
    if "mrope_section" in (text.get("rope_parameters") or text.get("rope_scaling") or {}):
        return "multimodal rotary positions (M-RoPE)"
    if not all(text.get("no_rope_layers") or ()):
        return "layers without rotary positions"
    return ""


def unsupported_option(given: Callable[[str], str | None]) -> str:
    """Why vLLM's options switch reuse off; empty if they do not.

    Args:
        given: the value of one of vLLM's options, ``None`` if it was not given.
    """
    if given("kv-cache-dtype") not in PLAIN_CACHE_TYPES:
        return f"the KV cache is quantised ({given('kv-cache-dtype')})"
    if given("speculative-config") is not None:
        return "speculative decoding is on"
    if {given("decode-context-parallel-size"), given("prefill-context-parallel-size")} - {None, "1"}:
        return "context parallelism is on"
    return ""
