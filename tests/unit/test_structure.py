"""The shape of the package: no circles, no name twice, and vLLM's private names in two files only."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import kvcomm_integrations

PACKAGE = Path(kvcomm_integrations.__file__).parent
ROOT = PACKAGE.name
PRIVATE_NAMES = {"connector/compat.py", "connector/workarounds.py"}
"""Where names of vLLM that are not public API may stand."""
PUBLIC_VLLM = {"vllm", "vllm.config", "vllm.platforms", "vllm.sampling_params"}
"""Modules of vLLM whose names its documentation tells users to import."""
SAME_JOB = {
    "identity.py": {"langchain", "autogen"},
    "messages.py": {"langchain", "autogen"},
    "options.py": {"langchain", "autogen"},
}
"""File names that may stand twice: the same job for two frameworks."""


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = (ROOT, *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path) -> Iterator[str]:
    """Modules that a file imports anywhere, and those of which it takes names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Some circle among modules, or an empty list."""
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph[module]):
            found = visit(other, [*trail, module])
            if found:
                return found
        done.add(module)
        return []

    for module in sorted(graph):
        if found := visit(module, []):
            return found
    return []


def test_no_modules_import_one_another_in_a_circle() -> None:
    files = modules()
    graph = {name: {other for other in imported(path) if other in files} - {name} for name, path in files.items()}
    graph[ROOT] = set()  # its names are loaded when they are asked for
    assert circle(graph) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_no_two_modules_share_a_name_unless_they_do_the_same_job_for_two_frameworks() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__init__.py":
            homes[path.name].add(path.parent.relative_to(PACKAGE).as_posix())
    twice = {name: folders for name, folders in homes.items() if len(folders) > 1}
    assert all(folders <= SAME_JOB.get(name, set()) for name, folders in twice.items()), twice


def test_private_names_of_vllm_stand_in_two_files() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE).as_posix()
        names = {name for name in imported(path) if name.partition(".")[0] == "vllm"}
        private = {name for name in names if not any(name == p or name.rpartition(".")[0] == p for p in PUBLIC_VLLM)}
        if private and where not in PRIVATE_NAMES:
            found[where] = private
    assert found == {}


def test_the_package_keeps_its_size() -> None:
    """What is deleted more than it adds stays deleted: raise these numbers only with a reason."""
    texts = {path: path.read_text(encoding="utf-8").splitlines() for path in PACKAGE.rglob("*.py")}
    assert sum(bool(line.strip()) for lines in texts.values() for line in lines) <= 23_800
    assert sum(len(lines) for path, lines in texts.items() if path.parent.name == "bench") <= 3_600
