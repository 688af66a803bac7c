"""The playground's routes: static files, held in memory, with a policy that lets a browser contact only this server.

The pages need no API key themselves; if the API does, they ask the user for one. Knows nothing of the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
PREFIX = "/playground/"
PAGES = {"/": "index.html", "/status": "status.html", "/workflows": "workflows.html"}
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "worker-src 'self'",
        "connect-src 'self'",
        "img-src 'self' blob:",  # blob: for pictures that the user opened, and results
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "cache-control": "no-cache",  # revalidate always: cheap with an ETag, and an upgraded server is seen at once
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True)
class StaticFile:
    """A file and the headers it is served with."""

    content: bytes
    headers: Mapping[str, str]  # all but content-length

    @property
    def etag(self) -> str:
        return self.headers["etag"]


def read_static(folder: Path = STATIC) -> dict[str, StaticFile]:
    """Path relative to `folder`, with slashes -> file; only files with a suffix in MEDIA_TYPES."""
    paths = (path for path in folder.rglob("*") if path.suffix in MEDIA_TYPES)
    return {path.relative_to(folder).as_posix(): _read(path) for path in sorted(paths)}


def playground_router() -> APIRouter:
    """Routes for GET and HEAD of the pages and their files."""
    files = read_static()
    served = {PREFIX + name: file for name, file in files.items() if name not in PAGES.values()}
    served |= {path: files[name] for path, name in PAGES.items()}
    router = APIRouter(include_in_schema=False)

    async def file(request: Request) -> Response:
        # Not the route's match, which may end before a newline; nor request.url, which trusts the Host header.
        path = request.scope["path"]
        if path not in served:
            raise HTTPException(404)
        return _answer(request, served[path])

    for path in (*PAGES, PREFIX + "{path:path}"):
        router.add_api_route(path, file, methods=["GET", "HEAD"], response_model=None)
    return router


def _read(path: Path) -> StaticFile:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    media_type = MEDIA_TYPES[PurePosixPath(path.name).suffix]
    return StaticFile(content, _HEADERS | {"content-type": media_type, "etag": etag})


def _answer(request: Request, file: StaticFile) -> Response:
    asked = request.headers.get("if-none-match", "")
    known = {tag.strip().removeprefix("W/") for tag in asked.split(",")}
    if file.etag in known or asked.strip() == "*":
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)
