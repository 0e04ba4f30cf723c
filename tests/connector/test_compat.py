"""What the connector refuses, and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowSpec

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.connector import compat
from kvcomm_integrations.connector.compat import cache_bytes_per_token, hash_block_size, unsupported_reason
from kvcomm_integrations.connector.scheduler import ConnectorScheduler
from kvcomm_integrations.connector.workarounds import calling_runner
from tests.connector.standins import BLOCK, BYTES_PER_TOKEN, cache_config, engine_config, make_request, spec

COMMON = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float32}


def hf(**fields: Any) -> Any:
    return SimpleNamespace(hf_text_config=SimpleNamespace(**fields))


def cache(dtype: str) -> Any:
    return SimpleNamespace(cache_dtype=dtype)


def parallel(**fields: int) -> Any:
    return SimpleNamespace(world_size=2, **fields)


def test_the_model_runner_is_found_among_the_callers() -> None:
    class SomeModelRunner:
        def initialize(self) -> Any:
            return Registers().register()

    class Registers:
        def register(self) -> Any:
            return calling_runner()

    runner = SomeModelRunner()
    assert runner.initialize() is runner
    assert Registers().register() is None


REFUSED = [
    (engine_config(), cache_config(spec(), spec()), "2 KV-cache groups"),
    (engine_config(), SimpleNamespace(kv_cache_groups=[]), "keeps no KV cache"),
    (engine_config(), cache_config(MLAAttentionSpec(**COMMON)), "multi-head latent attention"),
    (engine_config(), cache_config(SlidingWindowSpec(**COMMON, sliding_window=128)), "SlidingWindowSpec"),
    (engine_config(), cache_config(spec(sliding_window=128)), "sliding-window"),
    (engine_config(), cache_config(spec(attention_chunk_size=64)), "chunked"),
    (engine_config(model_config=hf(sliding_window=4096)), cache_config(), "4096 tokens"),
    (engine_config(cache_config=cache("fp8")), cache_config(), "quantised"),
    (engine_config(cache_config=cache("fp8_e5m2")), cache_config(), "quantised"),
    (engine_config(speculative_config=SimpleNamespace()), cache_config(), "speculative"),
    (engine_config(parallel_config=parallel(decode_context_parallel_size=2)), cache_config(), "context parallel"),
    (engine_config(parallel_config=parallel(prefill_context_parallel_size=2)), cache_config(), "context parallel"),
]
ACCEPTED = [
    engine_config(),
    engine_config(model_config=hf(sliding_window=4096, use_sliding_window=False)),
    engine_config(model_config=hf(sliding_window=None)),
    engine_config(cache_config=cache("bfloat16")),
    engine_config(parallel_config=parallel(decode_context_parallel_size=1)),
]


@pytest.mark.parametrize(("engine", "caches", "reason"), REFUSED)
def test_what_is_not_understood_is_served_densely(engine: Any, caches: Any, reason: str) -> None:
    refusal = unsupported_reason(engine, caches)
    assert refusal is not None and reason in refusal
    half = ConnectorScheduler(engine, caches, ReuseConfig())
    request = make_request(list(range(40)), {"segments": []})
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) == 0
    half.update_state_after_alloc(request, (1, 2, 3), 0)
    kept, out = half.request_finished(request, [1, 2, 3])
    assert not kept and out is not None and reason in out["kvcomm"]["reason"]


def test_a_vllm_that_lacks_something_serves_densely_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "shortcoming", lambda version: f"vLLM {version} lacks Request.status, for one")
    ConnectorScheduler(engine_config(), cache_config(), ReuseConfig())
    said = f"KV reuse is off: vLLM {vllm.__version__} lacks Request.status, for one. Requests are served densely."
    assert [record.message for record in caplog.records] == [said]


@pytest.mark.parametrize("engine", ACCEPTED)
def test_plain_full_attention_is_understood(engine: Any) -> None:
    assert unsupported_reason(engine, cache_config()) is None


def test_sizes() -> None:
    assert cache_bytes_per_token(cache_config()) == BYTES_PER_TOKEN
    assert cache_bytes_per_token(SimpleNamespace(kv_cache_groups=[])) == 0  # type: ignore[arg-type]
    assert hash_block_size(engine_config(), cache_config()) == BLOCK
    finer = engine_config(cache_config=SimpleNamespace(cache_dtype="auto", hash_block_size=4))
    assert hash_block_size(finer, cache_config()) == 4
