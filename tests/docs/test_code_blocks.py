"""What README and documentation tell a reader to type works: Python runs, commands and options exist, data parses."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from kvcomm_integrations import cli
from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines import registry as shared
from kvcomm_integrations.engines.fake import FakeEngine
from kvcomm_integrations.engines.interface import Engine
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from tests.docs.blocks import PAGES, ROOT, Block, blocks, of_language

RUN = {"README.md", "tutorial.md"} | {
    f"howto-{name}.md" for name in ("langgraph", "autogen", "report", "gate", "server")
}
"""Pages whose Python is executed, on an engine without a model. Others' Python is compiled and its imports made."""


def ids(found: list[Block]) -> list[str]:
    return [block.where for block in found]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name in RUN], ids=lambda page: page.name)
def test_python_runs(page: Path, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ChatTokenizer.from_pretrained(str(demo_model))
    answer = "There are 25 primes below 100, and the farmer spends 1428 dollars on hay in a week, as was asked for."

    def fake(config: EngineConfig) -> Engine:
        return FakeEngine(tokenizer, answer, config=config)

    monkeypatch.setattr(shared, "_make", fake)
    monkeypatch.setattr(shared, "_engines", {})
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python":
            code = compile(block.body, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, namespace)  # our own documentation
            if inspect.isawaitable(result):
                asyncio.run(_wait(result))


async def _wait(result: object) -> None:
    assert inspect.isawaitable(result)
    await result


PYTHON = [block for block in of_language("python") if block.page.name not in RUN]


@pytest.mark.parametrize("block", PYTHON, ids=ids(PYTHON))
def test_python_compiles_and_imports(block: Block) -> None:
    compile(block.body, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(ast.parse(block.body)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kvcomm_integrations"):
            module = import_module(str(node.module))
            for alias in node.names:
                getattr(module, alias.name)


SHELL = of_language("console", "bash", "shell", "sh")


@pytest.mark.parametrize("block", SHELL, ids=ids(SHELL))
def test_commands_exist(block: Block) -> None:
    for words in commands(block.body.replace("\\\n", " ")):
        while words and re.fullmatch(r"\w+=.*", words[0], re.DOTALL):
            words = words[1:]
        if words:
            check(words)


def commands(body: str) -> Iterator[list[str]]:
    """The words of each command; a quotation may go over several lines."""
    pending = ""
    for line in body.splitlines():
        pending = f"{pending}\n{line}" if pending else line.removeprefix("$ ")
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:
            continue
        pending = ""
        yield words
    assert not pending, "a quotation is not closed"


def check(words: list[str]) -> None:
    command, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    for separator in ("|", ">", "&", "&&"):
        arguments = arguments[: arguments.index(separator)] if separator in arguments else arguments
    if command == "kvcomm":
        check_arguments(arguments)
    elif command == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in arguments if "=" not in word} <= set(targets)
    elif command == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for named in re.findall(r"kvcomm-integrations\[([\w,]+)\]", " ".join(arguments)):
            assert set(named.split(",")) <= set(extras)
    elif command == "python":
        assert [word for word in arguments if word.endswith(".py") and not (ROOT / word).is_file()] == []


def check_arguments(arguments: list[str]) -> None:
    """The subcommand exists and takes these options."""
    parser = cli._parser()
    try:
        if arguments[:1] == ["serve"]:  # passes on what vLLM's server knows
            parser.parse_known_args(arguments)
        else:
            parser.parse_args(arguments)
    except SystemExit as ended:
        if ended.code:
            pytest.fail(f"kvcomm {shlex.join(arguments)} is not understood")


DATA = of_language("json", "yaml", "toml")


@pytest.mark.parametrize("block", DATA, ids=ids(DATA))
def test_data_parses(block: Block) -> None:
    {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}[block.language](block.body)


def test_every_block_says_its_language() -> None:
    assert [block.where for block in of_language("")] == []


def test_python_version() -> None:
    """The documentation's range of versions is the package's."""
    assert (3, 11) <= sys.version_info[:2] <= (3, 13)
