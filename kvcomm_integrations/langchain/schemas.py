"""Tools and schemas in OpenAI's form, as LangChain's core writes them, but with recursive parts kept.

Core writes every reference out and puts ``{}``, which allows anything, where one leads back to itself.
"""

from __future__ import annotations

from typing import Any

from langchain_core.tools import BaseTool, create_schema_from_function
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import PydanticUserError, TypeAdapter
from typing_extensions import is_typeddict

from kvcomm_integrations.chat.recursive_schema import recursive_schema


def openai_tool(tool: Any) -> dict[str, Any]:
    """As core's ``convert_to_openai_tool``; parameters that contain themselves keep their ``$defs``."""
    if (full := _recursive(tool)) is None:
        return convert_to_openai_tool(tool)
    if isinstance(tool, type):
        return convert_to_openai_tool({"title": tool.__name__, "description": "", **full})
    converted = convert_to_openai_tool(tool)
    parameters = {key: value for key, value in full.items() if key not in ("title", "description")}
    return {**converted, "function": {**converted["function"], "parameters": parameters}}


def json_schema(schema: dict[str, Any] | type) -> dict[str, Any]:
    """As core's ``convert_to_json_schema``; a schema that contains itself keeps its ``$defs``."""
    if isinstance(schema, type) and (full := _recursive(schema)) is not None:
        return {"title": schema.__name__, "description": "", **full}
    return convert_to_json_schema(schema)


def _recursive(source: Any) -> dict[str, Any] | None:
    """The schema of a class, a tool or a function if it contains itself."""
    if isinstance(source, BaseTool):
        source = source.tool_call_schema
    elif callable(source) and not isinstance(source, type):
        if not hasattr(source, "__name__"):
            return None
        source = create_schema_from_function(source.__name__, source, parse_docstring=True)
    if isinstance(source, dict):
        return recursive_schema(source)
    try:
        if isinstance(source, type) and is_basemodel_subclass(source):
            to_schema = getattr(source, "model_json_schema", None) or getattr(source, "schema")  # noqa: B009 - pydantic 1
            return recursive_schema(to_schema())
        return recursive_schema(TypeAdapter(source).json_schema()) if is_typeddict(source) else None
    except PydanticUserError:  # what pydantic has no schema for: core's own conversion decides
        return None
