"""The HTTP of the baselines: `/v1/images/edits` with OpenAI's fields and one PNG back.

Beside it what `benchmark_serving` asks for: /ready, worker seconds in /metrics, and queue times in the answer, in the
shape of Stencil's.
"""

from __future__ import annotations

import argparse
import base64
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from PIL import Image, ImageOps
from starlette.datastructures import FormData, UploadFile

from benchmarks.command import DTYPES
from core.config import EMBEDDED_MODEL
from core.messages.image_processor import MaskKind

DEFAULT_STEPS = 28
KEEP_ALIVE_SECONDS = 75
"""Of an idle connection: longer than clients keep one (httpx: 5 s, as uvicorn), or a request is lost that a client
sends while the server closes."""


@dataclass(eq=False)
class Upload:
    """One edit as it came. came: seconds of CLOCK_MONOTONIC."""

    prompt: str
    image: bytes
    mask: bytes
    is_alpha: bool
    steps: int
    seed: int
    came: float = field(default_factory=time.monotonic)

    @property
    def mask_kind(self) -> MaskKind:
        return "alpha" if self.is_alpha else "luminance"


@dataclass(frozen=True)
class Edited:
    """png: base64 of the file. begun: when its computation began, seconds of CLOCK_MONOTONIC. ms: milliseconds of its
    parts, facts: more of the answer's `stencil` object, of an engine that knows them.
    """

    png: str
    begun: float
    ms: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)


class Backend(Protocol):
    """What computes. busy_seconds: that it did so far."""

    busy_seconds: float

    async def edit(self, upload: Upload) -> Edited: ...


def make_app(backend: Backend) -> FastAPI:
    """An app that is ready when the backend is made."""
    app = FastAPI()

    @app.get("/ready")
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(f"baseline:worker_busy_seconds_total {backend.busy_seconds}\n", media_type="text/plain")

    @app.post("/v1/images/edits")
    async def edits(request: Request) -> dict[str, object]:
        upload = await _read(request)
        edited = await backend.edit(upload)
        facts = {"ms": {"queue": 1e3 * (edited.begun - upload.came), **edited.ms}, **edited.facts}
        return {"created": int(time.time()), "data": [{"b64_json": edited.png}], "stencil": facts}

    return app


async def _read(request: Request) -> Upload:
    form = await request.form()
    is_alpha = "mask_image" not in form
    return Upload(
        prompt=_text(form, "prompt"),
        image=await _file(form, "image"),
        mask=await _file(form, "mask" if is_alpha else "mask_image"),
        is_alpha=is_alpha,
        steps=int(_text(form, "num_inference_steps", str(DEFAULT_STEPS))),
        seed=int(_text(form, "seed", "0")),
    )


def _text(form: FormData, name: str, default: str | None = None) -> str:
    value = form.get(name, default)
    if not isinstance(value, str):
        raise HTTPException(400, f"'{name}' is missing")
    return value


async def _file(form: FormData, name: str) -> bytes:
    value = form.get(name)
    if not isinstance(value, UploadFile):
        raise HTTPException(400, f"'{name}' is missing")
    return await value.read()


def decode(upload: Upload) -> tuple[Image.Image, Image.Image]:
    """The picture, and its mask, white = edit. Raises OSError."""
    with Image.open(io.BytesIO(upload.image)) as image, Image.open(io.BytesIO(upload.mask)) as mask:
        white = ImageOps.invert(mask.getchannel("A")) if upload.is_alpha else mask.convert("L")
        return image.convert("RGB"), white


def encode(picture: Image.Image) -> str:
    """base64 of a PNG, compressed as Pillow does unasked."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def serve(app: FastAPI, port: int) -> None:
    """Until SIGTERM."""
    uvicorn.Server(server_config(app, port)).run()


def server_config(app: FastAPI, port: int) -> uvicorn.Config:
    """Of every baseline, and of the balancer before them."""
    return uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", timeout_keep_alive=KEEP_ALIVE_SECONDS)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What every baseline takes."""
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="diffusers checkpoint")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="compute type")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
