"""Requests that a server must refuse with 4xx, whatever state it is in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak.pictures import area, template_file, transparent_mask


@dataclass(frozen=True)
class BadRequest:
    """call: keyword arguments of httpx."""

    name: str
    path: str = "/v1/images/edits"
    method: str = "POST"
    call: dict[str, Any] = field(default_factory=dict)


def _form(name: str, fields: dict[str, str], image: bytes | None = None, mask: bytes | None = None) -> BadRequest:
    files = {"image": image or template_file(1), "mask": mask or _MASK}
    return BadRequest(name, call={"data": {"prompt": "a hat", "num_inference_steps": "2"} | fields, "files": files})


_MASK = transparent_mask(area("small", 128, 128))  # of template 1

BAD_REQUESTS: tuple[BadRequest, ...] = (
    _form("no prompt", {"prompt": ""}),
    _form("too many images", {"n": "11"}),
    _form("no steps", {"num_inference_steps": "0"}),
    _form("no number", {"seed": "1e400"}),
    _form("an unknown model", {"model": "../../etc/passwd"}),
    _form("an unknown template", {"template_id": "tmpl_0"}),
    _form("a size that is none", {"size": "7x7"}),
    _form("a huge size", {"size": "99999x99999"}),
    _form("urls", {"response_format": "url"}),
    _form("no picture", {}, image=b"not a picture"),
    _form("half a picture", {}, image=template_file(1)[:2000]),
    _form("a mask of another size", {}, mask=transparent_mask(area("small", 64, 64))),
    BadRequest("no form", call={"content": b"--x", "headers": {"content-type": "multipart/form-data; boundary=x"}}),
    BadRequest("no media type", call={"content": b"hello", "headers": {"content-type": "text/plain"}}),
    BadRequest("broken json", call={"content": b'{"prompt":', "headers": {"content-type": "application/json"}}),
    BadRequest("a url to fetch", call={"json": {"prompt": "x", "images": [{"image_url": "http://127.0.0.1/"}]}}),
    BadRequest("a number as prompt", "/v1/images/generations", call={"json": {"prompt": 5}}),
    BadRequest("a thin canvas", "/v1/images/generations", call={"json": {"prompt": "x", "size": "16x1600"}}),
    BadRequest("no such path", "/v1/no/such/path", "GET"),
    BadRequest("a wrong method", "/v1/images/edits", "GET"),
    BadRequest("a template without image", "/v1/templates", call={"files": {"other": b"x"}}),
    BadRequest("no such template", "/v1/templates/tmpl_0", "GET"),
    BadRequest("deleting no template", "/v1/templates/tmpl_0", "DELETE"),
)
