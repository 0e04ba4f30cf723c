"""What the documentation takes from the code when it is built, so that it cannot drift from it.

Pages name what they want in comments: ``<!-- settings: module.Class -->``, ``<!-- commands -->`` and
``<!-- messages -->``. Needs neither torch nor vLLM.
"""

from __future__ import annotations

import ast
import re
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
PACKAGE = ROOT / "kvcomm_integrations"


def on_config(config: Any) -> Any:
    """Put pages that the navigation does not name into it, so that none is lost."""
    named = set(re.findall(r"[\w./-]+\.md", str(config["nav"])))
    docs = Path(config["docs_dir"])
    found = sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))
    extra = [name for name in found if name not in named]
    if extra:
        config["nav"].insert(-3, {"In depth": extra})
    return config


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Fill in what comes from the code, and show links out of the documentation as plain paths."""
    markdown = re.sub(r"<!-- settings: ([\w.]+) -->", lambda found: settings_table(found[1]), markdown)
    markdown = re.sub("<!-- commands -->", lambda found: commands(), markdown)
    markdown = re.sub("<!-- messages -->", lambda found: messages(), markdown)
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2`)", markdown)


# --- settings --------------------------------------------------------------------------------------------------------


def settings_table(path: str) -> str:
    """A table of a pydantic model's fields: type, default, and the docstring under each."""
    module, _, name = path.rpartition(".")
    model = getattr(import_module(module), name)
    docs: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if cls.__module__.startswith("kvcomm_integrations."):
            docs |= field_docstrings(cls.__module__, cls.__name__)
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for field, info in model.model_fields.items():
        kind = str(info.annotation).replace("typing.", "").replace("|", "\\|")
        kind = getattr(info.annotation, "__name__", kind) if "[" not in kind and "|" not in kind else kind
        kind = re.sub(r"kvcomm_integrations\.[\w.]*\.", "", kind)
        default = "required" if info.is_required() else f"`{_default(info)}`"
        bounds = ", ".join(filter(None, map(_bound, info.metadata)))
        meaning = " ".join((docs.get(field, "")).split()).replace("|", "\\|").replace("``", "`")
        lines.append(f"| `{field}` | `{kind}`{f' ({bounds})' if bounds else ''} | {default} | {meaning} |")
    return "\n".join(lines)


def _bound(limit: Any) -> str:
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "min_length": "length at least"}
    return ", ".join(f"{sign} {getattr(limit, name)}" for name, sign in signs.items() if hasattr(limit, name))


def _default(info: Any) -> str:
    value = info.get_default(call_default_factory=True)
    if isinstance(value, int) and value >= 1 << 30 and value % (1 << 30) == 0:
        return f"{value >> 30} << 30"
    return f"{type(value).__name__}()" if hasattr(type(value), "model_fields") else str(getattr(value, "value", value))


def field_docstrings(module: str, name: str) -> dict[str, str]:
    """The string under each field of a class."""
    tree = ast.parse(Path(import_module(module).__file__ or "").read_text(encoding="utf-8"))
    (node,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    docs = {}
    for field, after in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[ast.unparse(field.target)] = str(after.value.value)
    return docs


# --- commands --------------------------------------------------------------------------------------------------------


def commands() -> str:
    """The help of every subcommand."""
    from kvcomm_integrations.cli import _parser

    return "\n\n".join(f"## `{parser.prog}`\n\n```text\n{parser.format_help()}```" for parser in _leaves(_parser()))


def _leaves(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    groups = [action for action in parser._actions if isinstance(action, _SubParsersAction)]
    if not groups:
        yield parser
    for group in groups:
        for below in group.choices.values():
            yield from _leaves(below)


# --- error messages --------------------------------------------------------------------------------------------------

TOPICS = {
    "langchain": "LangGraph and LangChain",
    "autogen": "AutoGen",
    "engines": "Engines and requests",
    "prompts": "Messages, tokenizers, templates",
    "connector": "Inside vLLM",
    "reuse": "Policies",
    "state": "Learned corrections",
    "serve": "Servers",
    "report": "Reports and the live page",
    "demo": "Demo",
    "bench": "Benchmarks",
}


def error_classes() -> set[str]:
    """Names of all our errors."""
    names, before = {"KVCommError"}, 0
    while len(names) != before:
        before = len(names)
        for tree in _trees().values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and names & {ast.unparse(base) for base in node.bases}:
                    names.add(node.name)
    return names


def error_messages() -> list[tuple[str, str, str]]:
    """Topic, class and message of every error raised with a message of its own; values are in angle brackets."""
    names = error_classes()
    found = {}
    for path, tree in _trees().items():
        topic = TOPICS.get(path.relative_to(PACKAGE).parts[0], "Package and command line")
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                name = ast.unparse(node.exc.func)
                message = _template(node.exc.args[0])
                if name in names and message:
                    found[topic, name, message] = None
    return sorted(found)


def messages() -> str:
    """All error messages by topic."""
    lines: list[str] = []
    topic = ""
    for here, name, message in error_messages():
        if here != topic:
            topic = here
            lines.append(f"\n### {topic}\n")
        lines.append(f"- `{name}`: `` {message} ``")
    return "\n".join(lines)


def _trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    if isinstance(node, ast.JoinedStr):
        parts = (str(part.value) if isinstance(part, ast.Constant) else _hole(part) for part in node.values)
        return " ".join("".join(parts).split())
    return ""


def _hole(part: ast.expr) -> str:
    assert isinstance(part, ast.FormattedValue)
    words = re.findall(r"[A-Za-z_]+", ast.unparse(part.value))
    named = [
        word for word in words if word not in ("self", "join", "str", "int", "len", "name", "__name__", "type", "or")
    ]
    return f"<{named[-1] if named else 'value'}>"
