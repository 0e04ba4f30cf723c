"""``with_structured_output``: binds a schema and puts the matching parser behind the model."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Literal, get_args

from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.base import OutputParserLike
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

Method = Literal["json_schema", "function_calling", "json_mode"]
Schema = dict[str, Any] | type


def structured_model(
    model: BaseChatModel,
    schema: Schema | None,
    *,
    method: Method,
    include_raw: bool,
    strict: bool | None,
    extra: Mapping[str, Any],
) -> Runnable[LanguageModelInput, Any]:
    """A runnable from model input to parsed answers.

    Raises:
        ValueError: unknown method, or no schema where one is needed.
    """
    if method not in get_args(Method):
        raise ValueError(f"method={method!r} is unknown; use one of {', '.join(get_args(Method))}")
    if schema is None and method != "json_mode":
        raise ValueError(f"method={method!r} needs a schema; give one, or use method='json_mode'")
    traced = {"ls_structured_output_format": {"kwargs": {"method": method}, "schema": schema}} if schema else {}
    if method == "function_calling":
        assert schema is not None
        llm, parser = _by_call(model, schema, strict, {**traced, **extra})
    elif method == "json_schema":
        assert schema is not None
        json_schema = convert_to_json_schema(schema)
        described: dict[str, Any] = {"name": json_schema.get("title", "answer"), "schema": json_schema}
        if strict is not None:
            described["strict"] = strict
        response_format = {"type": "json_schema", "json_schema": described}
        llm, parser = model.bind(response_format=response_format, **traced, **extra), _json_parser(schema)
    else:
        llm, parser = model.bind(response_format={"type": "json_object"}, **traced, **extra), _json_parser(schema)
    return _with_raw(llm, parser) if include_raw else llm | parser


def _by_call(
    model: BaseChatModel, schema: Schema, strict: bool | None, bound: Mapping[str, Any]
) -> tuple[Runnable[LanguageModelInput, Any], OutputParserLike[Any]]:
    name = convert_to_openai_tool(schema)["function"]["name"]
    llm = model.bind_tools([schema], tool_choice=name, strict=strict, parallel_tool_calls=False, **bound)
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return llm, PydanticToolsParser(tools=[schema], first_tool_only=True)
    return llm, JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def _json_parser(schema: Schema | None) -> BaseOutputParser[Any]:
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticOutputParser(pydantic_object=schema)
    return JsonOutputParser()


def _with_raw(
    llm: Runnable[LanguageModelInput, Any], parser: OutputParserLike[Any]
) -> Runnable[LanguageModelInput, Any]:
    parsed: Runnable[Any, Any] = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed: Runnable[Any, Any] = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")
