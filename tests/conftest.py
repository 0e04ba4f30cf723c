"""What all tests share: a quiet, offline environment and the two models. Set before anything heavy is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LANGSMITH_TRACING": "false",
}.items():
    os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of SmolLM2-135M-Instruct, or of the model that ``KVCOMM_TEST_MODEL`` names."""
    if override := os.environ.get("KVCOMM_TEST_MODEL"):
        return Path(override)
    from kvcomm_integrations.demo_model import ensure_demo_model

    return ensure_demo_model(progress=False)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of a tiny random Llama (4 layers, 8 heads, 4 KV heads) with SmolLM2's tokenizer."""
    from kvcomm_integrations.demo_model import ensure_tiny_model

    return ensure_tiny_model()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU, and most of the reliability tests unless they are asked for."""
    if "reliability" not in str(config.getoption("-m")):
        for item in items:
            if not all(mark.kwargs.get("always") for mark in item.iter_markers("reliability")):
                item.add_marker(pytest.mark.skip(reason="takes long; runs with -m reliability"))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and there is none"))
