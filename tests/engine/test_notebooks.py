"""The example notebooks on the real engine: one by default, all with ``make notebooks``.

With ``KVCOMM_NOTEBOOKS=write`` their outputs are stored in them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
ALWAYS = {"debate_graph"}
WANTED = os.environ.get("KVCOMM_NOTEBOOKS", "")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def worth_storing(output: Any) -> bool:
    """What the notebook itself shows; not what vLLM and other packages log, which names processes and folders."""
    return output.output_type != "stream" or (output.name == "stdout" and "pid=" not in output.text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem not in ALWAYS and WANTED not in ("all", "write"):
        pytest.skip("run by `make notebooks`")
    monkeypatch.setenv("KVCOMM_TEST_MODEL", str(demo_model))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    served = path.stem == "served_engine"  # prints what was loaded; the others end with a report
    if not served:
        notebook.cells.append(nbformat.v4.new_code_cell('print(sum(row["loaded"] for row in _.rows()), "loaded")'))
    kernel = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=kernel)
    asyncio.run(client.async_execute())
    said = next(cell for cell in reversed(notebook.cells) if cell.cell_type == "code" and "loaded" in cell.source)
    assert int(said.outputs[-1].text.split()[0]) > 0
    if not served:
        notebook.cells.pop()
    if WANTED == "write":
        for cell in notebook.cells:
            cell.metadata = {}
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if worth_storing(output)]
        notebook.metadata["language_info"] = {"name": "python", "version": ".".join(map(str, sys.version_info[:2]))}
        nbformat.write(notebook, path)
