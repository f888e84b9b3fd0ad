"""The page at /docs, made from the OpenAPI description alone: no script, nothing loaded from elsewhere."""

import html
import json
from typing import Any

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
code,pre{font:13px/1.45 ui-monospace,monospace;background:#f4f4f4;border-radius:3px}pre{padding:.7rem;overflow:auto}
h2{margin-top:2.2rem}table{border-collapse:collapse}td,th{text-align:left;padding:.15rem .8rem .15rem 0;
vertical-align:top}"""


def docs_page(api: dict[str, Any]) -> str:
    """One HTML page: each route with its fields, their types and limits.

    Args:
        api: an OpenAPI 3.1 document.
    """
    schemas = api.get("components", {}).get("schemas", {})
    title = html.escape(f"{api['info']['title']} {api['info']['version']}")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>",
        f"<h1>{title}</h1><p>Every request carries <code>Authorization: Bearer TOKEN</code>. Errors are ",
        '<code>{"error": {"code", "message", "fix"}}</code>. ',
        "The same as data: <code>/openapi.json</code>.</p>",
    ]
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation.get('description', ''))}</p>")
            bodies = {"send": operation.get("requestBody"), "get": operation["responses"].get("200")}
            for heading, content in bodies.items():
                schema = (content or {}).get("content", {}).get("application/json", {}).get("schema")
                if schema:
                    parts.append(f"<b>{heading}</b>{_fields(schema, schemas)}")
    return "".join(parts) + "</html>\n"


def _fields(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """A table of an object's fields."""
    name = schema.get("$ref", "").rpartition("/")[2]
    target = schemas.get(name, schema)
    needed = target.get("required", [])
    rows = [
        f"<tr><td><code>{html.escape(field)}</code>{'' if field in needed else ' (optional)'}</td>"
        f"<td><code>{html.escape(_type(inner))}</code></td><td>{html.escape(inner.get('description', ''))}</td></tr>"
        for field, inner in target.get("properties", {}).items()
    ]
    return f"<p>{html.escape(target.get('description', ''))}</p><table>{''.join(rows)}</table>"


def _type(schema: dict[str, Any]) -> str:
    """A field's type in a few words, with its limits and default."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        text = " or ".join(_type(option) for option in options)
    elif schema.get("type") == "array":
        text = f"list of {_type(schema.get('items', {}))}"
    else:
        text = schema.get("type", "any")
    limits = {"minimum": ">=", "maximum": "<=", "minItems": "items >=", "maxItems": "items <=", "maxLength": "chars <="}
    text += "".join(f", {sign} {schema[key]}" for key, sign in limits.items() if key in schema)
    if "enum" in schema or "const" in schema:
        text = json.dumps(schema.get("enum", [schema.get("const")]))
    return text + (f", default {json.dumps(schema['default'])}" if schema.get("default") is not None else "")
