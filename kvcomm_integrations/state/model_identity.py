"""Hashes that identify a model: equal for equal models on every machine and for every number of ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcomm_integrations.reuse.rope import Rope

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
SAMPLES = 64
SAMPLE_BYTES = 4096

_INCIDENTAL = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
"""Entries of a configuration that do not change what the model computes."""


def config_hash(config: Mapping[str, Any]) -> str:
    """Hash of a model's configuration without incidental entries, such as its folder and the version that wrote it."""
    kept = {key: value for key, value in config.items() if key not in _INCIDENTAL}
    raw = json.dumps(kept, sort_keys=True, default=str).encode()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def weights_hash(place: Path) -> str:
    """Hash over sizes and evenly spaced samples of the weight files in a folder (or of one file); empty if none.

    A few hundred KiB are read per file, so this takes milliseconds; any training run changes every sample.
    """
    files = [place] if place.is_file() else sorted(p for p in place.glob("*") if p.suffix in WEIGHT_SUFFIXES)
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(size * sample // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest() if files else ""


def rope_text(rope: Rope) -> str:
    """A rotation in words: the same for equal rotations, whichever machine computed their frequencies."""
    rounded = ",".join(f"{value:.5e}" for value in rope.inv_freq.tolist())
    frequencies = hashlib.blake2b(rounded.encode(), digest_size=6).hexdigest()
    pairs = "neighbours" if rope.interleaved else "halves"
    return f"{rope.rotary_dim} channels, {pairs}, scale {rope.scale:g}, frequencies {frequencies}"
