"""``with_structured_output``: binds a schema and puts the matching parser behind the model."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Literal, get_args

from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.base import OutputParserLike
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.pydantic import is_basemodel_subclass
from typing_extensions import is_typeddict

from kvcomm_integrations.langchain.schemas import json_schema, openai_tool

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
    shown = json_schema(schema) if schema and is_typeddict(schema) else schema  # core cannot read a recursive one
    traced = {"ls_structured_output_format": {"kwargs": {"method": method}, "schema": shown}} if schema else {}
    bound = {**traced, **extra}
    llm: Runnable[LanguageModelInput, Any]
    if method == "function_calling" and schema is not None:
        name = openai_tool(schema)["function"]["name"]
        llm = model.bind_tools([schema], tool_choice=name, strict=strict, parallel_tool_calls=False, **bound)
    else:
        llm = model.bind(response_format=_response_format(method, schema, strict), **bound)
    parser = _parser(method, schema)
    if not include_raw:
        return llm | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _response_format(method: Method, schema: Schema | None, strict: bool | None) -> dict[str, Any]:
    if method == "json_mode" or schema is None:
        return {"type": "json_object"}
    full = json_schema(schema)
    described = {"name": full.get("title", "answer"), "schema": full}
    return {"type": "json_schema", "json_schema": described if strict is None else {**described, "strict": strict}}


def _parser(method: Method, schema: Schema | None) -> OutputParserLike[Any]:
    pydantic = schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None
    if method != "function_calling" or schema is None:
        return PydanticOutputParser(pydantic_object=pydantic) if pydantic else JsonOutputParser()
    if pydantic:
        return PydanticToolsParser(tools=[pydantic], first_tool_only=True)
    name = openai_tool(schema)["function"]["name"]
    return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
