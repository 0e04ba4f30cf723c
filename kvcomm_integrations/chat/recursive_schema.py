"""JSON schemas that contain themselves. Frameworks write references out, which loses such a part or never ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def recursive_schema(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """A schema with its definitions beside it, as an object at the root; ``None`` if no definition leads to itself.

    Args:
        schema: As pydantic writes it: references into ``$defs`` (version 1: ``definitions``), at the root as well.
    """
    defs: Mapping[str, Any] = schema.get("$defs") or schema.get("definitions") or {}
    uses = {name: set(_references(part)) for name, part in defs.items()}
    if not any(name in _reached(name, uses) for name in uses):
        return None
    root = defs.get(_name(schema.get("$ref", "")), {})
    return {**root, **{key: value for key, value in schema.items() if key != "$ref" or not root}}


def _references(part: Any) -> Iterator[str]:
    if isinstance(part, Mapping):
        if isinstance(part.get("$ref"), str):
            yield _name(part["$ref"])
        part = list(part.values())
    for inner in part if isinstance(part, list) else ():
        yield from _references(inner)


def _name(reference: str) -> str:
    return reference.rpartition("/")[2]


def _reached(start: str, uses: Mapping[str, set[str]]) -> set[str]:
    """The definitions that ``start`` leads to."""
    reached: set[str] = set()
    ahead = list(uses[start])
    while ahead:
        if (name := ahead.pop()) not in reached:
            reached.add(name)
            ahead += uses.get(name, ())
    return reached
