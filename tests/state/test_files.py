"""Files: nothing is lost in them, and nothing wrong is read from them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvcomm_integrations.errors import StateFileError
from kvcomm_integrations.state import files
from kvcomm_integrations.state.files import read_manifest, read_state, write_state
from kvcomm_integrations.state.learned import LEARNS
from kvcomm_integrations.state.manifest import HeadRange

from .states import HEADS, MODEL, edge, equal, examples, state

LESSONS = examples(edge(), edge("critic"), edge("writer", "other"), edge())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "state.safetensors"
    write_state(path, state(LESSONS))
    return path


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> None:
    """Write the file again with another manifest or other tensors, as a bug or an attacker would."""
    with safe_open(path, framework="pt") as file:
        manifest = json.loads(file.metadata()["kvcomm"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(manifest, tensors)
    save_file(tensors, path, metadata={"kvcomm": json.dumps(manifest)})


def test_a_round_trip_changes_no_bit(saved: Path) -> None:
    equal(read_state(saved), state(LESSONS))
    assert read_manifest(saved).whole
    assert read_manifest(saved).examples == 4


def test_a_rank_reads_its_own_heads(saved: Path) -> None:
    heads = HeadRange(first=1, count=2)
    equal(read_state(saved, heads=heads), state(LESSONS).of_heads(heads))
    share = saved.with_name("share")
    write_state(share, state(LESSONS, heads))
    with pytest.raises(StateFileError, match="only 1 to 2"):
        read_state(share, heads=HeadRange(first=0, count=HEADS))


def test_a_file_is_its_owners_alone(saved: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [saved.name]


def test_a_write_that_fails_leaves_the_old_file(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateFileError, match="No space left"):
        write_state(saved, state(LESSONS[:1]))
    assert saved.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [saved.name]


def test_every_truncation_is_refused(saved: Path) -> None:
    data = saved.read_bytes()
    for length in (0, 1, 7, 8, 9, 200, len(data) // 2, len(data) - 1):
        saved.write_bytes(data[:length])
        with pytest.raises(StateFileError, match="truncated"):
            read_state(saved)
    saved.write_bytes(data + b"\0")
    with pytest.raises(StateFileError, match="truncated"):
        read_state(saved)


def test_no_flipped_bit_passes(saved: Path) -> None:
    data = saved.read_bytes()
    for at in [*range(8, 2000, 97), *range(2000, len(data), len(data) // 23)]:
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        saved.write_bytes(flipped)
        with pytest.raises(StateFileError):
            read_state(saved)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(StateFileError, match="No such file"):
        read_state(path)
    path.write_bytes(b"\x80\x04\x95 a pickle is never read" * 40)
    with pytest.raises(StateFileError, match="no state file"):
        read_state(path)
    save_file({"weight": torch.ones(3)}, path)
    with pytest.raises(StateFileError, match="no kvcomm manifest"):
        read_state(path)
    with pytest.raises(StateFileError, match="Is a directory"):
        read_state(tmp_path)


def test_sizes_are_bounded(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateFileError, match=f"has {saved.stat().st_size} bytes, more than the 1000 allowed"):
        read_state(saved, max_bytes=1000)
    monkeypatch.setattr(files, "MAX_HEADER_BYTES", 100)
    with pytest.raises(StateFileError, match="its header would have"):
        read_state(saved)


def test_another_format_is_named(saved: Path) -> None:
    rewritten(saved, lambda manifest, tensors: manifest.update(format=7))
    with pytest.raises(StateFileError, match="has format 7; this build reads format 1"):
        read_manifest(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, t: m.update(surprise=1), "not valid at surprise"),
        (lambda m, t: m["edges"][0].update(examples=0), "not valid at edges.0.examples"),
        (lambda m, t: m["edges"][0].update(source="x" * 257), "not valid at edges.0.source"),
        (lambda m, t: m["heads"].update(first=3), "heads up to 7 of a model with 4"),
        (lambda m, t: m["edges"].pop(), "does not hold the tensors"),
        (lambda m, t: t.update({"9.mean": torch.ones(1)}), "does not hold the tensors"),
        (lambda m, t: t.update({"0.mean": torch.ones(2, 4, 5)}), r"0.mean is \(2, 4, 5\)"),
        (lambda m, t: t.update({"0.mean": t["0.mean"].double()}), "not of finite float32"),
        (lambda m, t: t["1.scatter"].view(-1)[3:4].fill_(float("nan")), "not of finite float32"),
        (lambda m, t: t["0.scatter"].neg_(), "negative variances"),
        (lambda m, t: t["0.mean"].add_(1e-3), "does not match its checksum"),
        (lambda m, t: m.update(policy="kvcomm"), "'kvcomm' learns cannot be kept"),
    ],
)
def test_what_is_inconsistent_is_refused(saved: Path, change: Callable[..., None], message: str) -> None:
    rewritten(saved, change)
    with pytest.raises(StateFileError, match=message):
        read_state(saved)


def test_both_values_are_named(saved: Path) -> None:
    manifest = read_manifest(saved)
    with pytest.raises(StateFileError, match="learned by policy 'ridge', not 'aligned'"):
        manifest.check_fits(MODEL, "aligned", "", "f")
    with pytest.raises(StateFileError, match=r"holds 'moments of .*', but this version of 'ridge' learns 'x'"):
        manifest.check_fits(MODEL, "ridge", "x", "f")
    for field, value in {
        "config": "other", "weights": "w", "dtype": "float16", "layers": 9, "kv_heads": 2, "head_dim": 8, "rope": "r",
    }.items():  # fmt: skip
        wanted = MODEL.model_copy(update={field: value})
        with pytest.raises(StateFileError, match=f"{field} {getattr(MODEL, field)!r}, not {value!r}"):
            manifest.check_fits(wanted, "ridge", LEARNS["ridge"], "f")


def test_tenants_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "acme"
    write_state(path, state(LESSONS).of_tenant("acme"))
    manifest = read_manifest(path)
    manifest.check_tenant("acme", "f")
    manifest.check_tenant(None, "f")
    with pytest.raises(StateFileError, match="of tenant 'acme', not of tenant 'other' alone"):
        manifest.check_tenant("other", "f")
    write_state(path, state(LESSONS))
    with pytest.raises(StateFileError, match="of every tenant, not of tenant 'acme' alone"):
        read_manifest(path).check_tenant("acme", "f")
    write_state(path, replace(state(LESSONS), tenant="acme"))
    with pytest.raises(StateFileError, match="holds an edge of 'other'"):
        read_manifest(path).check_tenant(None, "f")


def test_show_and_merge_from_the_command_line(saved: Path, tmp_path: Path) -> None:
    shares = []
    for rank in range(2):
        shares.append(tmp_path / f"share{rank}")
        write_state(shares[-1], state(LESSONS[:2], HeadRange(first=2 * rank, count=2)))
    out = tmp_path / "merged"

    def kvcomm(*args: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvcomm_integrations.cli", "state", *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = kvcomm("merge", out, saved, *shares)
    assert (done.returncode, done.stdout) == (0, f"{out}: 3 edges, 6 examples\n")
    again = kvcomm("merge", out, saved)
    assert again.returncode == 2
    assert "give --force" in again.stderr
    shown = kvcomm("show", out)
    assert shown.returncode == 0
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert ["planner", "solver", "user_question", "acme", "3", "24"] in rows
    assert json.loads(kvcomm("show", "--json", out).stdout)[str(out)]["policy"] == "ridge"
    saved.write_bytes(saved.read_bytes()[:-5])
    broken = kvcomm("show", saved)
    assert broken.returncode == 2
    assert "truncated" in broken.stderr
