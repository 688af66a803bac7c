"""The routes by which clients upload pictures and masks, and view files."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from core.errors import InvalidImageError, InvalidRequestError
from engine.client.upload import KeptUpload
from entrypoints.comfy_api.comfy_route import ComfyRoute
from entrypoints.comfy_api.files import LIMITS, FileName, Files, StoredFile, media_type
from entrypoints.comfy_api.prompt import decode
from entrypoints.comfy_api.refusals import no_file
from entrypoints.openai.answer.errors import UnsupportedContentTypeError
from entrypoints.openai.body.chunks import read_chunks
from entrypoints.openai.body.multipart import Part, read_multipart
from entrypoints.openai.body.upload_slots import UploadSlots
from entrypoints.openai.body.uploads import file_too_large
from entrypoints.openai.guards.middleware import owner_of

MULTIPART = "multipart/form-data"
MAX_FORM_BYTES = 64 * 1024
"""Of a form, but for its file."""

_FIELDS = ("image", "overwrite", "type", "subfolder", "original_ref")


class _Reference(msgspec.Struct):
    """A file that a client names."""

    filename: str
    subfolder: str = ""
    type: str = "output"


def upload_router(files: Files, places: UploadSlots, max_upload_bytes: int) -> APIRouter:
    """max_upload_bytes: per file."""
    router = APIRouter(route_class=ComfyRoute)

    @router.post("/upload/image")
    async def upload_image(request: Request) -> Response:
        """Keep a picture, for nodes that load it."""
        texts, name, content = await _read(request, places, max_upload_bytes)
        return _keep(request, texts, name, StoredFile(content))

    @router.post("/upload/mask")
    async def upload_mask(request: Request) -> Response:
        """Keep a picture's mask, by the transparency of the file, as a picture that has it."""
        texts, name, content = await _read(request, places, max_upload_bytes)
        wanted = 'original_ref is an object of JSON, {"filename": ..., "subfolder": ..., "type": ...}'
        reference = decode(texts.get("original_ref", ""), _Reference, wanted)
        original = FileName.of(reference.filename, reference.subfolder, reference.type)
        found = files.find(owner_of(request.scope), original)
        if found is None:
            raise InvalidRequestError(f"Invalid 'original_ref': no file {original.name!r}.", param="original_ref")
        return _keep(request, texts, name, StoredFile(found.content, StoredFile(content)))

    def _keep(request: Request, texts: dict[str, str], name: str, file: StoredFile) -> Response:
        owner = owner_of(request.scope)
        wanted = FileName.of(name, texts.get("subfolder", ""), texts.get("type") or "input")
        if texts.get("overwrite") not in ("true", "1"):
            wanted = files.free_name(owner, wanted, file)
        if not files.put(owner, wanted, file):
            raise file_too_large("image", LIMITS.nbytes)
        shown = {"name": wanted.name, "subfolder": wanted.subfolder, "type": wanted.folder}
        return Response(msgspec.json.encode(shown), media_type="application/json")

    @router.get("/view")
    async def view(
        request: Request,
        filename: str = "",
        subfolder: str = "",
        folder: Annotated[str, Query(alias="type")] = "output",
        channel: str = "rgba",
    ) -> Response:
        """A file, as it was uploaded or made."""
        if channel != "rgba":
            raise InvalidRequestError("Invalid 'channel': files are served whole; leave it out.", param="channel")
        name = FileName.of(filename, subfolder, folder)
        found = files.find(owner_of(request.scope), name)
        if found is None:
            return no_file(request, name)
        shown = found.mask or found
        head = b"".join([piece async for piece in shown.chunks()][:1])[:12]
        headers = {
            "content-length": str(shown.size),
            "content-disposition": f'filename="{filename.encode("ascii", "replace").decode()}"',
            "x-content-type-options": "nosniff",
        }
        return StreamingResponse(shown.chunks(), headers=headers, media_type=media_type(head))

    return router


async def _read(request: Request, places: UploadSlots, most: int) -> tuple[dict[str, str], str, KeptUpload]:
    """(text fields, name of the file, its content) of a form. Raises InvalidRequestError and below."""
    content_type = request.headers.get("content-type", "")
    if (kind := content_type.partition(";")[0].strip().lower()) != MULTIPART:
        raise UnsupportedContentTypeError(kind, MULTIPART)

    def rule(part: Part, earlier: object) -> tuple[int, bool]:
        return (most if part.is_file else MAX_FORM_BYTES), part.name in _FIELDS

    async with places.take(owner_of(request.scope)):
        chunks = read_chunks(request, most + MAX_FORM_BYTES)
        parts = await read_multipart(chunks, content_type, rule)
    try:
        texts = {part.name: await part.text() for part in parts if not part.is_file and part.name in _FIELDS}
        file = next((part for part in parts if part.is_file and part.name == "image"), None)
        if file is None or not file.filename or not file.received:
            raise InvalidRequestError("Missing required parameter: 'image', a file with a name.", param="image")
        content = await KeptUpload.of(file.content)
    finally:
        for part in parts:
            part.content.close()
    head = b"".join([piece async for piece in content.chunks()][:1])[:12]
    if not media_type(head):
        message = "Invalid image file: it is no PNG, JPEG or WebP."
        raise InvalidImageError(message, param="image", code="invalid_image_file")
    return texts, file.filename, content
