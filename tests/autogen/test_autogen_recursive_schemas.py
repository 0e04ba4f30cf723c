"""Tools and answers whose schema contains itself, in AutoGen."""

import json

import pytest
from ag_helpers import fake
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from pydantic import BaseModel


class Node(BaseModel):
    name: str
    children: list["Node"] = []


DEEP = {"name": "a", "children": [{"name": "b", "children": []}]}
WRONG = {"name": "a", "children": [{"name": 3, "children": []}]}


def plant(tree: Node, by_name: dict[str, Node]) -> str:
    return tree.name


async def test_tools_and_answers_are_enforced_at_every_level(make):
    jsonschema = pytest.importorskip("jsonschema")
    client = make(None)
    ask = [UserMessage(content="q", source="user")]
    tool = FunctionTool(plant, description="Plant a tree.")
    await client.create(ask, tools=[tool], tool_choice="required")
    tag = json.loads(fake(client).requests[-1].sampling.structured_output["structural_tag"])
    arguments = jsonschema.Draft202012Validator(tag["format"]["tags"][0]["content"]["json_schema"])
    assert arguments.is_valid({"tree": DEEP, "by_name": {"x": DEEP}})
    assert not arguments.is_valid({"tree": WRONG, "by_name": {}})
    assert not arguments.is_valid({"tree": DEEP, "by_name": {"x": WRONG}})
    await client.create(ask, json_output=Node)
    answer = jsonschema.Draft202012Validator(fake(client).requests[-1].sampling.structured_output["json"])
    assert answer.is_valid(DEEP)
    assert not answer.is_valid(WRONG)
