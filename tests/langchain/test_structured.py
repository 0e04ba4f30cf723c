"""with_structured_output: three methods, every kind of schema, raw answers, errors, streaming."""

from __future__ import annotations

import json
from typing import Annotated, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from lc_helpers import fake
from pydantic import BaseModel, Field, ValidationError
from pydantic.v1 import BaseModel as BaseModelV1


class Answer(BaseModel):
    """An answer."""

    value: int = Field(description="the number")
    unit: str


class AnswerV1(BaseModelV1):
    """An answer."""

    value: int
    unit: str


class AnswerDict(TypedDict):
    """An answer."""

    value: Annotated[int, ..., "the number"]
    unit: str


SCHEMA = {
    "title": "Answer",
    "description": "An answer.",
    "type": "object",
    "properties": {"value": {"type": "integer"}, "unit": {"type": "string"}},
    "required": ["value", "unit"],
}
EXPECTED = {"value": 3, "unit": "text"}
SCHEMAS = [Answer, AnswerV1, AnswerDict, SCHEMA]


def plain(parsed):
    return (
        parsed
        if isinstance(parsed, dict)
        else parsed.dict()
        if isinstance(parsed, BaseModelV1)
        else parsed.model_dump()
    )


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_parsed_answers(make_tools, schema, method):
    model = make_tools(json.dumps(EXPECTED) if method == "json_mode" else None)
    structured = model.with_structured_output(schema, method=method)
    results = [structured.invoke("q"), await structured.ainvoke("q"), list(structured.stream("q"))[-1]]
    assert [plain(result) for result in results] == [EXPECTED] * 3
    if isinstance(schema, type) and schema is not AnswerDict:
        assert all(isinstance(result, schema) for result in results)


def test_the_schema_is_enforced_while_tokens_are_drawn(make):
    model = make()
    model.with_structured_output(Answer).invoke("q")
    model.with_structured_output(SCHEMA, method="json_mode").invoke("q")
    model.with_structured_output(Answer, method="function_calling").invoke("q")
    one, two, three = (request.sampling.structured_output for request in fake(model).requests)
    assert one["json"]["required"] == ["value", "unit"]
    assert two == {"json_object": True}
    assert "Answer" in three["structural_tag"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_include_raw(make_tools, method):
    model = make_tools(json.dumps(EXPECTED) if method == "json_mode" else None)
    result = model.with_structured_output(Answer, method=method, include_raw=True).invoke("q")
    assert result["parsed"] == Answer(**EXPECTED) and result["parsing_error"] is None
    assert result["raw"].usage_metadata["total_tokens"] > 0


def test_a_broken_answer_is_an_error_or_is_returned_with_raw(make):
    model = make('{"value": "many"')
    with pytest.raises((OutputParserException, ValidationError)):
        model.with_structured_output(Answer).invoke("q")
    result = model.with_structured_output(Answer, include_raw=True).invoke("q")
    assert result["parsed"] is None and result["parsing_error"] is not None
    assert result["raw"].content == '{"value": "many"'


def test_json_mode_needs_no_schema(make):
    assert make('{"a": 1}').with_structured_output(method="json_mode").invoke("q") == {"a": 1}


def test_bad_arguments_are_refused(make):
    with pytest.raises(ValueError, match="json_scheme"):
        make().with_structured_output(Answer, method="json_scheme")
    with pytest.raises(ValueError, match="schema"):
        make().with_structured_output()


def test_dicts_stream_as_they_grow(make):
    steps = list(make(json.dumps(EXPECTED), engine={"delta_tokens": 1}).with_structured_output(SCHEMA).stream("q"))
    assert steps[-1] == EXPECTED and len(steps) > 1


def test_what_tracing_is_told(make):
    bound = make().with_structured_output(Answer).first
    assert bound.kwargs["ls_structured_output_format"] == {"kwargs": {"method": "json_schema"}, "schema": Answer}


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ["yes", "no"]}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": Answer}, {"json": Answer.model_json_schema()}),
    ],
)
def test_constraints_can_be_bound_directly(make, asked, sent):
    model = make()
    model.bind(**asked).invoke("q")
    assert fake(model).requests[0].sampling.structured_output == sent


def test_an_unknown_response_format_is_refused(make):
    with pytest.raises(ValueError, match="response_format"):
        make().invoke("q", response_format={"type": "xml"})
