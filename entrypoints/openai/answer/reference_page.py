"""The page at /docs: the OpenAPI document as text. It needs no script and nothing of another host, so that it is there
without internet too, and a reader's address is told to nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
body { color: CanvasText; background: Canvas; color-scheme: light dark; }
h2 { margin-top: 2.5rem; font: 600 1.05rem ui-monospace, monospace; border-top: 1px solid; padding-top: 1rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
td, th { text-align: left; vertical-align: top; padding: 0.25rem 1rem 0.25rem 0; border-bottom: 1px solid #8884; }
"""
_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
_LIMITS = ("enum", "minimum", "maximum", "minLength", "maxLength", "default")


def reference_router() -> APIRouter:
    """The route of the page."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs", response_model=None)
    async def reference(request: Request) -> HTMLResponse:
        return HTMLResponse(page_of(request.app.openapi()), headers=_HEADERS)

    return router


def page_of(document: Mapping[str, Any]) -> str:
    """HTML of an OpenAPI document: every operation with its parameters and the fields of its bodies."""
    title = escape(document["info"]["title"])
    return "\n".join(
        (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}: API</title>',
            f"<style>{_STYLE}</style><h1>{title}</h1><p>{escape(document['info'].get('summary', ''))}</p>",
            '<p>For programs: <a href="openapi.json">openapi.json</a>.</p>',
            *(
                _operation(method, path, described)
                for path, methods in document["paths"].items()
                for method, described in methods.items()
            ),
            "</html>",
        )
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    bodies = operation.get("requestBody", {}).get("content", {})
    return "\n".join(
        (
            f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation.get('description', ''))}</p>",
            *(_table("Parameter", _parameters(operation)) if operation.get("parameters") else ()),
            *(line for kind, body in bodies.items() for line in _table(kind, _fields(body["schema"]))),
        )
    )


def _parameters(operation: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    for each in operation["parameters"]:
        yield (
            each["name"],
            each.get("schema", {}) | {"description": each.get("description", "")},
            bool(each.get("required")),
        )


def _fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    for name, its in schema.get("properties", {}).items():
        yield name, its, name in schema.get("required", ())


def _table(head: str, rows: Iterator[tuple[str, Mapping[str, Any], bool]]) -> Iterator[str]:
    yield f"<table><tr><th>{escape(head)}</th><th>Type</th><th></th></tr>"
    for name, schema, is_required in rows:
        limits = ", ".join(f"{key} {schema[key]}" for key in _LIMITS if key in schema)
        meaning = " ".join(filter(None, (schema.get("description", ""), f"({limits})" if limits else "")))
        kind = f"{_kind(schema)}{', required' if is_required else ''}"
        yield f"<tr><td><code>{escape(name)}</code></td><td>{escape(kind)}</td><td>{escape(meaning)}</td></tr>"
    yield "</table>"


def _kind(schema: Mapping[str, Any]) -> str:
    """The type in a word or two."""
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(map(_kind, options))
    if schema.get("format") == "binary":
        return "file"
    return str(schema.get("type", "any"))
