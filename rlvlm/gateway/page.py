"""The page at /docs, made from the OpenAPI description alone: no script, nothing loaded from elsewhere."""

import json
from typing import Any

from rlvlm.templates import render

_LIMITS = {"minimum": ">=", "maximum": "<=", "minItems": "items >=", "maxItems": "items <=", "maxLength": "chars <="}


def docs_page(api: dict[str, Any]) -> str:
    """One HTML page: each route with its fields, their types and limits.

    Args:
        api: an OpenAPI 3.1 document.
    """
    return render(
        "routes.html.j2",
        title=f"{api['info']['title']} {api['info']['version']}",
        paths=api["paths"],
        schemas=api.get("components", {}).get("schemas", {}),
        type_name=type_name,
    )


def type_name(schema: dict[str, Any]) -> str:
    """A field's type in a few words, with its limits and default."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        text = " or ".join(map(type_name, options))
    elif schema.get("type") == "array":
        text = f"list of {type_name(schema.get('items', {}))}"
    else:
        text = schema.get("type", "any")
    text += "".join(f", {sign} {schema[key]}" for key, sign in _LIMITS.items() if key in schema)
    if "enum" in schema or "const" in schema:
        text = json.dumps(schema.get("enum", [schema.get("const")]))
    return text + (f", default {json.dumps(schema['default'])}" if schema.get("default") is not None else "")
