"""The documentation builds without a warning, takes its facts from the code, and has an entry for every error."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from kvcomm_integrations.config import EngineConfig, ReuseConfig
from tests.docs.blocks import ROOT


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = spec_from_file_location("mkdocs_hooks", ROOT / "mkdocs_hooks.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def words(page: Path) -> str:
    """A page's text, without markup."""
    text = re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))
    return " ".join(html.unescape(text).split())


def test_every_message_has_an_entry(site: Path, hooks: Any) -> None:
    page = words(site / "troubleshooting.html")
    messages = hooks.error_messages()
    assert len(messages) > 100
    assert [message for _, _, message in messages if " ".join(message.split()) not in page] == []


def test_every_kind_of_error_is_explained(hooks: Any) -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert [name for name in hooks.error_classes() if f"| `{name}` |" not in page] == []


def test_every_setting_is_in_the_reference(site: Path) -> None:
    page = words(site / "configuration.html")
    assert [name for model in (ReuseConfig, EngineConfig) for name in model.model_fields if name not in page] == []


def test_every_setting_of_reuse_is_explained(hooks: Any) -> None:
    docs = hooks.field_docstrings("kvcomm_integrations.config", "ReuseConfig")
    assert set(ReuseConfig.model_fields) <= set(docs)


def test_every_command_is_in_the_reference(site: Path) -> None:
    page = words(site / "commands.html")
    for command in ("demo", "explain", "report", "top", "doctor", "bench fidelity", "model"):
        assert f"usage: kvcomm {command}" in page


def test_every_page_is_reachable(site: Path) -> None:
    index = (site / "index.html").read_text(encoding="utf-8")
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert [name for name in pages if f"{name}.html" not in index] == []


def test_no_page_needs_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert loaded == [], page.name
