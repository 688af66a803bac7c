"""The OpenAPI description of the image and template endpoints, built from the table of request fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.control import MAX_CONTROLS
from entrypoints.openai.body.submission import MAX_INPUT_IMAGES
from entrypoints.openai.fields.field import Field
from entrypoints.openai.fields.fields import (
    ADAPTER_FIELDS,
    EDIT_FIELDS,
    GENERATION_FIELDS,
    MASK_FIELDS,
    TEMPLATE_FIELDS,
)

_FILE = {"type": "string", "format": "binary"}
_CONTROLS = {"description": "Pictures that steer the steps, for models with ControlNets."}
_TEXT = {"type": "string"}
_DATA_URL = _TEXT | {"description": "A data: URL."}
_IMAGE_URL = {"oneOf": [{"type": "object", "properties": {"image_url": _DATA_URL}}, _DATA_URL]}
_ERROR_FIELDS = {"message": _TEXT, "type": _TEXT, "param": _TEXT, "code": _TEXT}
_ERROR = {"type": "object", "properties": {"error": {"type": "object", "properties": _ERROR_FIELDS}}}


def _properties(fields: Mapping[str, Field]) -> dict[str, Any]:
    return {field.name: field.schema() for field in fields.values()}


def _pictures(item: dict[str, Any]) -> dict[str, Any]:
    """An array of pictures. A request may have MAX_INPUT_IMAGES of them in all its fields together."""
    return {"type": "array", "items": item, "maxItems": MAX_INPUT_IMAGES}


def _controls(item: dict[str, Any]) -> dict[str, Any]:
    """An array of control pictures."""
    return {"type": "array", "items": item, "maxItems": MAX_CONTROLS}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"schema": {"type": "object", "properties": properties, "required": list(required)}}


def _with_any(content: dict[str, Any], *required: str) -> dict[str, Any]:
    """The content, of which at least one of these fields must be there."""
    return {"schema": content["schema"] | {"anyOf": [{"required": [name]} for name in required]}}


def _body(content: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": content}}


EDIT_BODY = _body(
    {
        "multipart/form-data": _object(
            {
                "image": {
                    "anyOf": [_FILE, _pictures(_FILE)],
                    "description": "PNG, WebP or JPEG; the first one is edited, others are references. Or template_id.",
                },
                "reference_image": _pictures(_FILE)
                | {"description": "Further pictures to look at, for models that see them."},
                "control_image": {"anyOf": [_FILE, _controls(_FILE)]} | _CONTROLS,
                "mask": _FILE | {"description": "With an alpha channel; transparent = edit."},
                "mask_image": _FILE | {"description": "White = edit; a file, or base64 text."},
            }
            | _properties(EDIT_FIELDS),
            "prompt",
        ),
        "application/json": _object(
            {
                "images": _pictures(_IMAGE_URL),
                "image": _IMAGE_URL | {"description": "Instead of `images`."},
                "reference_images": _pictures(_IMAGE_URL),
                "control_image": {"anyOf": [_IMAGE_URL, _controls(_IMAGE_URL)]} | _CONTROLS,
                "mask": _IMAGE_URL,
                "mask_image": _TEXT,
            }
            | _properties(EDIT_FIELDS),
            "prompt",
        ),
    }
)
_MASK_KINDS = ("mask_prompt", "mask_points", "mask_box")
MASK_BODY = _body(
    {
        "multipart/form-data": _with_any(
            _object(
                {"image": _FILE | {"description": "PNG, WebP or JPEG. Or template_id."}} | _properties(MASK_FIELDS)
            ),
            *_MASK_KINDS,
        ),
        "application/json": _with_any(_object({"image": _IMAGE_URL} | _properties(MASK_FIELDS)), *_MASK_KINDS),
    }
)
GENERATION_BODY = _body(
    {
        kind: _with_any(
            _object({"control_image": {"anyOf": [item, _controls(item)]} | _CONTROLS} | _properties(GENERATION_FIELDS)),
            *("prompt", "class_label"),
        )
        for kind, item in (("application/json", _IMAGE_URL), ("multipart/form-data", _FILE))
    }
)
TEMPLATE_BODY = _body(
    {
        "multipart/form-data": _object(
            {"image": _FILE | {"description": "PNG, WebP or JPEG."}} | _properties(TEMPLATE_FIELDS), "image"
        )
    }
)

LOAD_ADAPTER_BODY = _body({"application/json": _object(_properties(ADAPTER_FIELDS), "lora_name", "lora_path")})
UNLOAD_ADAPTER_BODY = _body(
    {"application/json": _object({"lora_name": ADAPTER_FIELDS["lora_name"].schema()}, "lora_name")}
)

_FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is wrong.", "content": {"application/json": {"schema": _ERROR}}},
    "5XX": {"description": "The server failed or is busy.", "content": {"application/json": {"schema": _ERROR}}},
}

IMAGE_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The images, or with `stream` a stream of events.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": _TEXT}},
    },
    **_FAILURES,
}
MASK_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The mask, and what it covers.",
        "content": {"application/json": {"schema": {"type": "object"}}},
    },
    **_FAILURES,
}
TEMPLATE_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The template.",
        "content": {
            "application/json": _object(
                {
                    "id": _TEXT,
                    "object": _TEXT,
                    "bytes": {"type": "integer", "description": "Size of the upload."},
                    "image_tokens": {"type": "integer"},
                    "page_bytes": {"type": "integer", "description": "Size of what was computed from it."},
                    "primed": {"type": "boolean", "description": "Whether that was computed."},
                    "created": {"type": "integer", "description": "Unix seconds."},
                }
            )
        },
    },
    **_FAILURES,
}
MODEL_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The adapter.",
        "content": {
            "application/json": _object(
                {
                    "id": _TEXT,
                    "object": _TEXT,
                    "parent": _TEXT | {"description": "The model that it is for, once it is loaded."},
                    "deleted": {"type": "boolean", "description": "True once it is not served any more."},
                    "ignored": {"type": "array", "items": _TEXT, "description": "Fields without effect."},
                }
            )
        },
    },
    **_FAILURES,
}
DELETED_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The template is forgotten.",
        "content": {"application/json": _object({"id": _TEXT, "object": _TEXT, "deleted": {"type": "boolean"}})},
    },
    **_FAILURES,
}
WORKFLOW_BODY = _body({"text/x-python": {"schema": _TEXT | {"description": "A file of workflows."}}}) | {
    "parameters": [
        {"name": name, "in": "query", "schema": _TEXT | {"description": description}}
        for name, description in (
            ("model", "The served model whose pictures they make; the first one if it is left out."),
            ("refiner", "The served model that plays this role for it; likewise for other roles."),
        )
    ]
}
WORKFLOW_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The names that are served now.",
        "content": {"application/json": {"schema": {"type": "object"}}},
    },
    **_FAILURES,
}
DELETED_WORKFLOW_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The workflow is served no more.",
        "content": {"application/json": _object({"id": _TEXT, "object": _TEXT, "deleted": {"type": "boolean"}})},
    },
    **_FAILURES,
}
