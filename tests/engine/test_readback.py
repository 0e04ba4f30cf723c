"""What is harvested from vLLM's cache is what the model itself computes, across block borders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from kvcomm_integrations.engines.inprocess import InProcessEngine
from tests.engine.helpers import QUESTIONS, Client, unrotated

pytestmark = [pytest.mark.engine, pytest.mark.served]

LENGTHS = (1, 127, 128, 129, 1000)


@pytest.fixture(scope="module")
def hf_model(engine: InProcessEngine):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(engine.config.model, dtype=torch.float32).eval()


def _tokens(client: Client, count: int) -> tuple[int, ...]:
    ids: tuple[int, ...] = ()
    number = 0
    while len(ids) < count:
        ids += client.encode(f"{QUESTIONS[number % len(QUESTIONS)]} That was question {number}.\n")
        number += 1
    return ids[:count]


def _harvested(engine: InProcessEngine, folder: Path, source: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    engine.call_workers("kvcomm_save_references", str(folder))
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            if file.metadata()["source"] == source and file.metadata()["name"] == "document":
                return file.get_tensor("keys"), file.get_tensor("values"), int(file.metadata()["position"])
    raise AssertionError(f"nothing was harvested from {source}")


@pytest.mark.parametrize("length", LENGTHS)
def test_harvest_equals_hugging_face(
    client: Client, engine: InProcessEngine, hf_model, tmp_path: Path, session: str, length: int
) -> None:
    head = "<|im_start|>user\nRead this: "
    content = _tokens(client, length)
    source = f"reader-{length}"
    prompt = client.prompt(head, ("document", content), "<|im_end|>\n<|im_start|>assistant\n")
    client.ask(prompt, agent=source, session=session, tokens=1, respond=False)
    client.ask(client.prompt("ok" + head), agent="other", session=session, tokens=1)  # lets the harvest be acknowledged
    keys, values, start = _harvested(engine, tmp_path, source)
    assert start == len(client.encode(head))
    assert keys.shape[2] == length
    with torch.inference_mode():
        cache = hf_model(torch.tensor([prompt.token_ids]), use_cache=True).past_key_values
    theta = hf_model.config.rope_parameters["rope_theta"]
    for layer in range(len(keys)):
        true_keys = unrotated(cache.layers[layer].keys[0, :, start : start + length], start, theta)
        true_values = cache.layers[layer].values[0, :, start : start + length]
        for got, true in ((keys[layer], true_keys), (values[layer], true_values)):
            assert (got - true).abs().max() / true.abs().max() < 1e-4
