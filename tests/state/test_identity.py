"""Equal models have equal hashes, and a trained one has another."""

from __future__ import annotations

from pathlib import Path

from kvcomm_integrations.reuse.rope import Rope
from kvcomm_integrations.state.model_identity import config_hash, rope_text, weights_hash


def test_a_configuration_is_what_computes() -> None:
    config = {"hidden_size": 64, "rope_theta": 1e4, "transformers_version": "5.0", "_name_or_path": "a"}
    assert config_hash(config) == config_hash({**config, "transformers_version": "4.57", "_name_or_path": "b"})
    assert config_hash(config) != config_hash({**config, "rope_theta": 1e6})


def test_weights_are_known_by_what_is_in_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(range(256)) * 4000)
        (tmp_path / name / "README.md").write_text(name)
    first = weights_hash(tmp_path / "a")
    assert first == weights_hash(tmp_path / "b") != ""
    assert first == weights_hash(tmp_path / "a" / "model.safetensors")
    (tmp_path / "b" / "model.safetensors").write_bytes(bytes(reversed(range(256))) * 4000)
    assert weights_hash(tmp_path / "b") != first
    assert weights_hash(tmp_path) == ""


def test_a_rotation_in_words() -> None:
    class Config:
        model_type = "llama"
        head_dim = 8
        rope_parameters = {"rope_type": "default", "rope_theta": 1e4}  # noqa: RUF012

    rope = Rope.from_hf_config(Config())
    assert rope_text(rope).startswith("8 channels, halves, scale 1, frequencies ")
    assert rope_text(rope) == rope_text(Rope(rope.inv_freq * (1 + 1e-7)))
    assert rope_text(rope) != rope_text(Rope(rope.inv_freq * 1.01))
