"""Schemas that contain themselves: what is enforced at every level, for structured output and for tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.tools import tool
from lc_helpers import fake
from pydantic import BaseModel
from pydantic.v1 import BaseModel as BaseModelV1
from typing_extensions import TypedDict


class Node(BaseModel):
    """A tree."""

    name: str
    children: list[Node] = []


class Author(BaseModel):
    books: list[Book] = []


class Book(BaseModel):
    author: Author


class Shelf(BaseModel):
    by_name: dict[str, Node]
    authors: list[Author]


class NodeV1(BaseModelV1):
    name: str
    children: list[NodeV1] = []


class NodeDict(TypedDict):
    name: str
    children: list[NodeDict]


for model in (Node, Author, Book, Shelf):
    model.model_rebuild()
NodeV1.update_forward_refs()

NODE = Node.model_json_schema()
PLANT = {"type": "object", "properties": {"tree": {"$ref": "#/$defs/Node"}}, "$defs": NODE["$defs"]}
DEEP = {"name": "a", "children": [{"name": "b", "children": [{"name": "c", "children": []}]}]}
WRONG = {"name": "a", "children": [{"name": "b", "children": [{"name": 3, "children": []}]}]}


@tool
def plant(tree: Node) -> str:
    """Plant a tree."""
    return tree.name


def plain_function(tree: Node) -> str:
    """Plant a tree."""
    return tree.name


def open_parts(part: Any) -> list[Any]:
    """Places that would allow anything."""
    if isinstance(part, dict):
        loose = [part] if not part else []
        return loose + [found for key, value in part.items() if key != "default" for found in open_parts(value)]
    return [found for value in part for found in open_parts(value)] if isinstance(part, list) else []


def accepts(schema: dict[str, Any], value: Any) -> bool:
    jsonschema = pytest.importorskip("jsonschema")
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def sent(model: Any, method: str) -> dict[str, Any]:
    """The schema that the engine was given."""
    constraint = fake(model).requests[-1].sampling.structured_output
    if method == "json_schema":
        return constraint["json"]
    return json.loads(constraint["structural_tag"])["format"]["tags"][0]["content"]["json_schema"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize(
    "schema", [Node, NodeV1, NodeDict, {"title": "Node", **NODE["$defs"]["Node"], "$defs": NODE["$defs"]}]
)
def test_every_level_is_enforced(make_tools, schema, method):
    model = make_tools(None)
    model.with_structured_output(schema, method=method, include_raw=True).invoke("q")
    enforced = sent(model, method)
    assert accepts(enforced, DEEP)
    assert not accepts(enforced, WRONG)
    assert enforced["type"] == "object"
    assert set(enforced["properties"]) == {"name", "children"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [Author, Book, Shelf])
def test_mutual_recursion_and_dicts_of_nodes(make_tools, schema, method):
    model = make_tools(None)
    model.with_structured_output(schema, method=method, include_raw=True).invoke("q")
    enforced = sent(model, method)
    assert open_parts(enforced) == []
    if schema is Shelf:
        assert accepts(enforced, {"by_name": {"x": DEEP}, "authors": [{"books": [{"author": {}}]}]})
        assert not accepts(enforced, {"by_name": {"x": WRONG}, "authors": []})
        assert not accepts(enforced, {"by_name": {}, "authors": [{"books": [{"author": {"books": [3]}}]}]})


@pytest.mark.parametrize(
    "given", [plant, plain_function, {"type": "function", "function": {"name": "plant", "parameters": PLANT}}]
)
def test_tools_too(make_tools, given):
    model = make_tools(None)
    model.bind_tools([given], tool_choice="any").invoke("q")
    enforced = sent(model, "tool")
    assert accepts(enforced, {"tree": DEEP})
    assert not accepts(enforced, {"tree": WRONG})


def test_what_is_not_recursive_is_written_as_before(make_tools):
    class Flat(BaseModel):
        """A pair."""

        node: int

    from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool

    from kvcomm_integrations.langchain.schemas import json_schema, openai_tool

    assert openai_tool(Flat) == convert_to_openai_tool(Flat)
    assert json_schema(Flat) == convert_to_json_schema(Flat)
