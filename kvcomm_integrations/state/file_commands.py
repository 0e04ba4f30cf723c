"""``kvcomm state show`` and ``kvcomm state merge``: state files, without an engine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvcomm_integrations.errors import StateFileError
from kvcomm_integrations.state.files import read_manifest, read_state, write_state
from kvcomm_integrations.state.learned import LearnedState, join_shards, merge_states
from kvcomm_integrations.state.manifest import StateManifest


def show(args: argparse.Namespace) -> int:
    """Print what state files hold, after checking every byte of them; a damaged one raises `StateFileError`."""
    files = []
    for path in args.files:
        read_state(path)
        files.append((str(path), read_manifest(path)))
    if args.json:
        print(json.dumps({path: manifest.model_dump(mode="json") for path, manifest in files}, indent=2))
        return 0
    console = Console(soft_wrap=True)
    for path, manifest in files:
        _print(console, path, manifest)
    return 0


def merge(args: argparse.Namespace) -> int:
    """Merge files into ``args.output``; raises `StateFileError` if it exists, unless forced, and as `merge_files`."""
    if args.output.exists() and not args.force:
        raise StateFileError(f"{args.output} exists already; give --force to replace it")
    manifest = write_state(args.output, merge_files(args.files))
    print(f"{args.output}: {len(manifest.edges)} edges, {manifest.examples} examples")
    return 0


def merge_files(paths: Sequence[Path]) -> LearnedState:
    """The state of one engine that had seen the examples of all files. Shares of an engine's ranks are joined first.

    Raises:
        StateFileError: a file is damaged, or they do not belong together.
    """
    whole: list[LearnedState] = []
    shares: list[LearnedState] = []
    for state in map(read_state, paths):
        (whole if state.heads.count == state.model.kv_heads else shares).append(state)
    return merge_states([*whole, join_shards(shares)] if shares else whole)


def _print(console: Console, path: str, manifest: StateManifest) -> None:
    model = manifest.model
    inside = "all" if manifest.whole else f"{manifest.heads.first} to {manifest.heads.end - 1}"
    facts = {
        "model": f"{model.name} {model.revision}".strip(),
        "weights": model.weights or "unknown",
        "configuration": model.config,
        "KV": f"{model.dtype}, {model.layers} layers, {model.kv_heads} heads ({inside} inside) of {model.head_dim}",
        "rotation": model.rope,
        "policy": f"{manifest.policy} {json.dumps(manifest.options) if manifest.options else ''}".strip(),
        "tenant": "every tenant's" if manifest.tenant is None else manifest.tenant,
        "written": f"{manifest.created} by version {manifest.package}, format {manifest.format}",
        "learned": f"{len(manifest.edges)} edges, {manifest.examples} examples",
    }
    console.print(path, style="bold", markup=False, highlight=False)
    for name, value in facts.items():
        console.print(f"  {name:<14}{value}", markup=False, highlight=False)
    table = Table("from", "to", "placeholder", "tenant", "examples", "tokens", box=None, padding=(0, 2))
    for edge in sorted(manifest.edges, key=lambda edge: -edge.examples):
        row = edge.source, edge.target, edge.name, edge.tenant or "-", str(edge.examples), str(edge.rows)
        table.add_row(*row)
    console.print(table)
