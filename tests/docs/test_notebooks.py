"""Notebooks as they are committed: valid, small, without errors or machine paths, and with code that imports."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


def test_there_are_six() -> None:
    assert len(NOTEBOOKS) == 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebook(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < 40_000
    assert re.findall(r"/(?:tmp|home|root|work|Users)/", text) == []
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        assert not [output for output in cell.outputs if output.output_type == "error"]
        compile(cell.source, path.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom):
                module = import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names)
