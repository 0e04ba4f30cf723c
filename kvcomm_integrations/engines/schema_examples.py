"""Makes up text that follows a structured-output constraint, for the fake engine. Deterministic; no grammar engine."""

from __future__ import annotations

import json
from typing import Any

Schema = dict[str, Any]
_SCALARS: dict[str, Any] = {"integer": 3, "number": 1.5, "boolean": True, "null": None, "string": "text"}


def example_text(constraint: dict[str, Any]) -> str:
    """Text that satisfies ``SamplingOptions.structured_output``.

    Raises:
        ValueError: a form for which no text can be made up (regex, grammar).
    """
    if "json" in constraint:
        schema = constraint["json"]
        return json.dumps(example(json.loads(schema) if isinstance(schema, str) else schema))
    if "choice" in constraint:
        return str(constraint["choice"][0])
    if constraint.get("json_object"):
        return "{}"
    if "structural_tag" in constraint:
        tag = constraint["structural_tag"]
        return _tagged((json.loads(tag) if isinstance(tag, str) else tag)["format"])
    raise ValueError(f"cannot make up text for structured output {sorted(constraint)}; give the fake engine a script")


def example(schema: Schema | bool, root: Schema | None = None, via: tuple[str, ...] = ()) -> Any:
    """A value that follows a JSON schema: required properties only, first of every choice.

    Args:
        schema: The schema, or a part of it.
        root: What references are resolved in; the schema itself by default.
        via: References on the way here. Where one comes again, lists are empty and what is optional is left out.
    """
    if isinstance(schema, bool):
        return {}
    root = schema if root is None else root
    if "$ref" in schema:
        return example(_resolve(root, schema["$ref"]), root, (*via, schema["$ref"]))
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for choice in ("anyOf", "oneOf", "allOf"):
        if schema.get(choice):
            return example(next((s for s in schema[choice] if not _comes_again(s, via)), schema[choice][0]), root, via)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        names = schema.get("required") or [name for name, part in properties.items() if not _comes_again(part, via)]
        return {name: example(properties.get(name, {}), root, via) for name in names}
    if kind == "array":
        items, least = schema.get("items", {}), schema.get("minItems", 0)
        return [] if not least and _comes_again(items, via) else [example(items, root, via)] * max(1, least)
    if kind in ("integer", "number") and "minimum" in schema:
        return max(_SCALARS[kind], schema["minimum"])
    return _SCALARS.get(kind, "text")


def _comes_again(schema: Schema | bool, via: tuple[str, ...]) -> bool:
    return isinstance(schema, dict) and schema.get("$ref") in via


def _resolve(root: Schema, reference: str) -> Schema:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return dict(found)


def _tagged(form: dict[str, Any]) -> str:
    """Text for a structural tag. Free text where no call is asked for; of two forms the last."""
    kind = form["type"]
    if kind == "or":
        return _tagged(form["elements"][-1])
    if kind == "json_schema":
        return json.dumps(example(form["json_schema"]))
    if kind == "const_string":
        return str(form["value"])
    if kind == "sequence":
        return "".join(map(_tagged, form["elements"]))
    if kind == "any_text":
        return "hm"
    if kind == "regex":
        return ""
    if kind == "tag":
        return f"{form['begin']}{_tagged(form['content'])}{form['end']}"
    if kind == "triggered_tags" and not form.get("at_least_one"):
        return "ok"
    return _tagged({"type": "tag", **form["tags"][0]})
