"""A second engine with small blocks, small prefill chunks and little memory: chunks, preemption, exactness."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.wire import Mode
from tests.engine.helpers import END, QUESTIONS, ROLES, Client, system, unrotated
from tests.engine.served import BOTH_AT_LENGTH, running
from tests.engine.test_repair_exact import check_repair

pytestmark = pytest.mark.engine

BLOCK = 32
TOKENS = 160 if os.environ.get("TRITON_INTERPRET") != "1" else 40
"""Of each answer that has to be preempted; the interpreter takes half a second for each."""


@pytest.fixture(scope="module", params=BOTH_AT_LENGTH)
def small(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """Tiny random Llama, block 32, chunks of 64 tokens, 40 blocks in all."""
    reuse = ReuseConfig(only_if_faster=False, policy="aligned", idle_budget=0, min_segment_tokens=1)
    bytes_per_block = BLOCK * 2 * 4 * 4 * 32 * 4
    config = EngineConfig(
        dtype="float32",
        model=str(tiny_model),
        max_model_len=1024,
        block_size=BLOCK,
        kv_cache_bytes=40 * bytes_per_block,
        reuse=reuse,
        engine_args={"max_num_batched_tokens": 64, "num_gpu_blocks_override": 40},
    )
    with running(request.param, config, tmp_path_factory.mktemp("small")) as engine:
        yield Client(engine)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 300])
def test_harvest_over_small_blocks_and_chunks_equals_hugging_face(
    small: Client, tiny_model: Path, tmp_path: Path, length: int
) -> None:
    from transformers import AutoModelForCausalLM

    text = small.encode(" ".join(QUESTIONS) * 2)[:length]
    prompt = small.prompt("Read: ", ("document", text), END)
    source = f"reader-{length}"
    small.ask(prompt, agent=source, session=source, tokens=1, respond=False)
    small.ask(small.prompt("ok"), agent="other", session=source, tokens=1)
    small.engine.call_workers("kvcomm_save_references", str(tmp_path))
    found = None
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            if file.metadata()["source"] == source and file.metadata()["name"] == "document":
                found = file.get_tensor("keys"), file.get_tensor("values")
    assert found is not None
    hf = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.inference_mode():
        cache = hf(torch.tensor([prompt.token_ids]), use_cache=True).past_key_values
    start = len(small.encode("Read: "))
    theta = hf.config.rope_parameters["rope_theta"]
    for layer, (keys, values) in enumerate(zip(*found, strict=True)):
        true_keys = unrotated(cache.layers[layer].keys[0, :, start : start + length], start, theta)
        true_values = cache.layers[layer].values[0, :, start : start + length]
        for got, true in ((keys, true_keys), (values, true_values)):
            assert (got - true).abs().max() / true.abs().max() < 1e-4


def test_reuse_with_chunked_prefill_reports_and_answers(small: Client) -> None:
    question = small.encode(" ".join(QUESTIONS))
    first = small.ask(small.prompt(system("planner"), ("user_question", question), END), agent="p", session="chunks")
    tail = "\n" + " ".join(QUESTIONS[:1]) + END  # longer than a chunk: the computed part is chunked too
    prompt = small.prompt(system("solver"), ("user_question", question), tail)
    second = small.ask(prompt, agent="s", session="chunks")
    assert first.report.loaded == 0
    assert second.report.loaded > len(question) // 2
    assert second.report.computed > 64


def test_preemption_ends_well(small: Client) -> None:
    """More requests than fit: some are preempted while they decode; all finish with the right number of tokens."""
    question = small.encode(QUESTIONS[0])

    async def flood() -> list[int]:
        requests = [
            small.request(
                small.prompt(system(agent), ("user_question", question), END),
                agent=agent,
                session=f"flood-{i % 2}",
                tokens=TOKENS,
                mode=Mode.AUTO,
            )
            for i in range(3)
            for agent in ROLES
        ]
        answers = await asyncio.wait_for(asyncio.gather(*(small.arun(r) for r in requests)), 200)
        return [len(a.ids) for a in answers if a.last.finish_reason == "length"]

    lengths = asyncio.run(flood())
    assert all(n == TOKENS for n in lengths)
    after = small.ask(small.prompt(system("writer"), ("user_question", question), END), agent="w", session="after")
    plain = small.ask(
        small.prompt(system("writer"), ("user_question", question), END), session="after", mode=Mode.DENSE, salt="plain"
    )
    assert after.ids == plain.ids


@pytest.mark.parametrize("count", [1, 4, 32])
def test_repair_is_bit_exact_over_small_blocks(small: Client, count: int) -> None:
    check_repair(small.engine, small, BLOCK, count)


def test_a_seed_gives_the_same_answer_whether_its_prompt_is_computed_in_parts_or_not(small: Client) -> None:
    """vLLM takes back what it drew for parts of a prompt by a counter that a CPU's generators do not have."""
    prompt = small.prompt("Read: ", ("document", small.encode(" ".join(QUESTIONS) * 2)[:300]), END)
    sampling = SamplingOptions(max_tokens=16, temperature=1.0, seed=5, ignore_eos=True)
    in_parts, at_once = (
        small.ask(prompt, agent="reader", mode=Mode.DENSE, sampling=sampling, salt="seeded") for _ in range(2)
    )
    assert in_parts.report.exact == 0
    assert at_once.report.exact > len(prompt.token_ids) - 64
    assert in_parts.ids == at_once.ids
