"""Notebooks as they are committed: valid, small, without errors or machine paths, and with code that imports."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from importlib import import_module
from pathlib import Path

import nbformat
import pytest

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines import registry as shared
from kvcomm_integrations.engines.fake import FakeEngine
from kvcomm_integrations.engines.interface import Engine
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.report.run_report import RunReport

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


@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if path.stem != "served_engine"], ids=lambda path: path.stem
)
def test_cells_run_on_an_engine_without_a_model(path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the later agents' prompts hold what earlier ones read. ``tests/engine`` runs notebooks on the real engine."""
    tokenizer = ChatTokenizer.from_pretrained(str(demo_model))
    answer = (
        "There are thirty-six bales for the cows a day, and fifteen more for the sheep, which makes fifty-one a day."
    )

    def fake(config: EngineConfig) -> Engine:
        return FakeEngine(tokenizer, answer, config=config)

    monkeypatch.setattr(shared, "_make", fake)
    monkeypatch.setattr(shared, "_engines", {})
    monkeypatch.setenv("KVCOMM_TEST_MODEL", str(demo_model))
    namespace: dict[str, object] = {"__name__": "__main__"}
    shown: object = None
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            *body, last = ast.parse(cell.source).body
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            result = eval(compile(ast.Module(body, []), path.name, "exec", flags=flags), namespace)
            if inspect.isawaitable(result):
                asyncio.run(_wait(result))
            if isinstance(last, ast.Expr):
                shown = eval(compile(ast.Expression(last.value), path.name, "eval"), namespace)
            else:
                exec(compile(ast.Module([last], []), path.name, "exec"), namespace)
    assert isinstance(shown, RunReport)
    reusing = [record for record in shown.records if record.asked == "auto"]
    assert len({record.agent for record in reusing}) > 1
    assert max(record.loaded for record in reusing) > 0


async def _wait(result: object) -> None:
    assert inspect.isawaitable(result)
    await result
