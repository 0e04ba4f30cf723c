"""State files: safetensors with a JSON manifest, written atomically, checked to the last byte when read.

Reading never executes anything (safetensors holds numbers only) and refuses a file larger than was allowed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvcomm_integrations._version import __version__
from kvcomm_integrations.errors import StateFileError
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.regression import DECAYS
from kvcomm_integrations.state.learned import LearnedEdge, LearnedState, require_saveable
from kvcomm_integrations.state.manifest import EdgeRecord, HeadRange, StateManifest, parse_manifest

MAX_BYTES = 16 << 30
"""Largest file that is read unless the caller says otherwise, bytes."""
MAX_HEADER_BYTES = 32 << 20
PARTS = ("mean", "scatter")
"""Tensors of each edge; in a file they are called ``<number of the edge>.<part>``."""


def write_state(path: Path, state: LearnedState) -> StateManifest:
    """Write a state file, readable by its owner only. What was at ``path`` is replaced at once or not at all.

    Raises:
        StateFileError: the folder cannot be written.
    """
    tensors = {f"{n}.{part}": getattr(edge, part).contiguous() for n, edge in enumerate(state.edges) for part in PARTS}
    records = tuple(EdgeRecord(**edge.edge._asdict(), examples=edge.examples, rows=edge.rows) for edge in state.edges)
    draft = StateManifest(
        **vars(state) | {"edges": records},
        package=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        learns=require_saveable(state.policy),
        digest="",
    )
    digest = _digest_of(draft)
    for name, tensor in tensors.items():
        _add(digest, name, tensor)
    manifest = draft.model_copy(update={"digest": digest.hexdigest()})
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:  # mode 0700
            written = Path(folder) / "state"
            save_file(tensors, written, metadata={"kvcomm": manifest.model_dump_json()})
            written.chmod(0o600)
            _sync(written)
            os.replace(written, path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise StateFileError(f"{path} could not be written: {error}") from error
    return manifest


def read_manifest(path: Path, *, max_bytes: int = MAX_BYTES) -> StateManifest:
    """The manifest alone; tensors are not read.

    Raises:
        StateFileError: the file is missing, too large, truncated or not of this format.
    """
    _check_size(path, max_bytes)
    try:
        with safe_open(path, framework="pt") as file:
            return parse_manifest(file.metadata(), str(path))
    except (OSError, SafetensorError) as error:
        raise StateFileError(f"{path} is truncated, damaged or no state file: {error}") from error


def read_state(path: Path, *, heads: HeadRange | None = None, max_bytes: int = MAX_BYTES) -> LearnedState:
    """Everything in a state file, or what one rank needs of it.

    Args:
        path: the file.
        heads: heads to keep; ``None``: those in the file.
        max_bytes: largest file to read.

    Raises:
        StateFileError: missing, too large, truncated, damaged, of another format, or without those heads.
    """
    manifest = read_manifest(path, max_bytes=max_bytes)
    require_saveable(manifest.policy)
    facts = manifest.model, manifest.policy, manifest.heads
    state = LearnedState(*facts, (), manifest.tenant, manifest.layout, manifest.options)
    heads, edges = heads or manifest.heads, list[LearnedEdge]()
    digest = _digest_of(manifest)
    try:
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != {f"{n}.{name}" for n in range(len(manifest.edges)) for name in PARTS}:
                raise StateFileError(f"{path} does not hold the tensors its manifest names: it is damaged")
            for number, record in enumerate(manifest.edges):
                edge = _read_edge(file, number, record, manifest, path)
                for name in PARTS:
                    _add(digest, f"{number}.{name}", getattr(edge, name))
                edges += replace(state, edges=(edge,)).of_heads(heads).edges
    except (OSError, SafetensorError) as error:
        raise StateFileError(f"{path} is truncated or damaged: {error}") from error
    if digest.hexdigest() != manifest.digest:
        raise StateFileError(f"{path} is damaged: it does not match its checksum {manifest.digest[:16]}")
    return replace(state, heads=heads, edges=tuple(edges))


def _read_edge(file: Any, number: int, record: EdgeRecord, manifest: StateManifest, path: Path) -> LearnedEdge:
    """One edge with both tensors checked: shape, type, finite, no negative variance."""
    model = manifest.model
    features = 2 * model.head_dim + len(DECAYS)
    lead, channels = (model.layers - 1, manifest.heads.count), features + 2 * model.head_dim
    tensors = {}
    for part, shape in zip(PARTS, ((*lead, channels), (*lead, features, channels)), strict=True):
        held = tuple(file.get_slice(f"{number}.{part}").get_shape())
        if held != shape:
            raise StateFileError(f"{path}: tensor {number}.{part} is {held}, but its model needs {shape}")
        tensor = tensors[part] = file.get_tensor(f"{number}.{part}")
        if tensor.dtype != torch.float32 or not bool(torch.isfinite(tensor).all()):
            raise StateFileError(f"{path}: tensor {number}.{part} is not of finite float32 numbers: it is damaged")
    if bool((tensors["scatter"].diagonal(dim1=-2, dim2=-1) < 0).any()):
        raise StateFileError(f"{path}: tensor {number}.scatter has negative variances: it is damaged")
    edge = Edge(record.source, record.target, record.name, record.scope)
    return LearnedEdge(edge, record.examples, record.rows, **tensors)


def _check_size(path: Path, max_bytes: int) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise StateFileError(f"{path} cannot be read: {error.strerror or error}") from error
    if size > max_bytes:
        raise StateFileError(f"{path} has {size} bytes, more than the {max_bytes} allowed")
    if header > min(MAX_HEADER_BYTES, size):
        raise StateFileError(f"{path} is truncated, damaged or no state file: its header would have {header} bytes")


def _digest_of(manifest: StateManifest) -> hashlib.blake2b:
    """The checksum of everything the manifest says, to be continued with the tensors."""
    content = manifest.model_copy(update={"digest": ""}).model_dump_json()
    return hashlib.blake2b(content.encode(), digest_size=32)


def _add(digest: hashlib.blake2b, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\0".encode())
    digest.update(memoryview(tensor.contiguous().numpy()).cast("B"))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
