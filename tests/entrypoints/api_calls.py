"""Calls of the images API over httpx, and checks of refusals."""

from __future__ import annotations

from typing import Any

import httpx

IMAGE = ("image", ("a.png", b"image bytes", "image/png"))
MASK = ("mask", ("m.png", b"mask bytes", "image/png"))


async def post_edit(client: httpx.AsyncClient, files: list[Any] | None = None, **fields: str) -> httpx.Response:
    parts = [(name, (None, value)) for name, value in ({"prompt": "a red hat"} | fields).items()]
    return await client.post("/v1/images/edits", files=parts + ([IMAGE] if files is None else files))


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req_")
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def assert_refused(response: httpx.Response, status: int, code: str, param: str | None) -> str:
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), error["message"]
    return error["message"]


async def post_json(client: httpx.AsyncClient, body: Any, path: str = "edits") -> httpx.Response:
    return await client.post(f"/v1/images/{path}", json=body)
