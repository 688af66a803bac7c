"""diffusers' FluxFillPipeline behind FastAPI, as in its guide "Create a server": one pipeline, one call at a time.

`--batch-size 8` adds static batches: when a call ends, waiting edits of the first one's size and steps form the next
batch, which runs until all of it is done. Files are decoded and encoded in the pipeline's thread, between its calls.

`/v1/images/edits` takes OpenAI's fields, `num_inference_steps`, `seed`, and two that leave out steps:
`first_block_cache`, a threshold (a step computes the first block alone where that has changed by less), and
`computed_steps`, a JSON list of the numbers of the steps to compute (the pipeline's argument `sigmas`). Worker seconds
(/metrics) and queue times are reported in the same form as Stencil's, for `benchmark_serving`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from PIL import Image
from starlette.datastructures import FormData, UploadFile

from benchmarks.baselines.fill_pipeline import FillEdit, FillPipeline
from benchmarks.command import command
from core.config import EMBEDDED_MODEL

Value = TypeVar("Value")

DEFAULT_STEPS = 28
KEEP_ALIVE_SECONDS = 75
"""For an idle connection. Must exceed what clients keep (httpx: 5 s, uvicorn's default too): a request sent while the
server closes the connection is lost."""
WARM_UP = FillEdit("a red shirt", Image.new("RGB", (256, 256)), Image.new("L", (256, 256), 255), 2, 0)


@dataclass(frozen=True)
class Upload:
    """One edit as received. mask: transparent where it edits. came: seconds of CLOCK_MONOTONIC."""

    prompt: str
    image: bytes
    mask: bytes
    steps: int
    seed: int
    computed: tuple[int, ...] | None
    first_block_cache: float | None
    came: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> tuple[object, ...]:
        """Edits with the same one may share a batch. Raises OSError for a file that is not an image."""
        with Image.open(io.BytesIO(self.image)) as header:
            return header.size, self.steps, self.computed, self.first_block_cache

    def decode(self) -> FillEdit:
        skipping = {"computed": self.computed, "first_block_cache": self.first_block_cache}
        return FillEdit.of_files(self.prompt, self.image, self.mask, self.steps, self.seed, **skipping)


@dataclass(frozen=True)
class Edited:
    """png: base64 of the file. begun: start of its computation, seconds of CLOCK_MONOTONIC."""

    png: str
    begun: float


@dataclass(eq=False)
class Waiting:
    """One edit, the future of its result, and the upload's key."""

    upload: Upload
    edited: asyncio.Future[Edited]
    key: tuple[object, ...]


class StaticBatches:
    """Batches of up to `batch_size`, one after the other, ordered by their first edits. busy_seconds: computing."""

    def __init__(self, pipeline: FillPipeline, batch_size: int) -> None:
        self.busy_seconds = 0.0
        self._pipeline = pipeline
        self._batch_size = batch_size
        self._waiting: deque[Waiting] = deque()
        self._thread = ThreadPoolExecutor(1)
        self._lock = asyncio.Lock()

    async def edit(self, upload: Upload) -> Edited:
        """The request that holds the lock runs the next batch: its own, or one that begins with an earlier edit."""
        waiting = Waiting(upload, asyncio.get_running_loop().create_future(), upload.key)
        self._waiting.append(waiting)
        async with self._lock:
            while not waiting.edited.done():
                await self._run(self._take())
        return waiting.edited.result()

    def _take(self) -> list[Waiting]:
        alike = [each for each in self._waiting if each.key == self._waiting[0].key][: self._batch_size]
        for each in alike:
            self._waiting.remove(each)
        return alike

    async def _run(self, batch: Sequence[Waiting]) -> None:
        """A batch fails as a whole."""
        loop = asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(self._thread, self._compute, [each.upload for each in batch])
        except (OSError, RuntimeError, ValueError) as error:
            for each in batch:
                each.edited.set_exception(error)
            return
        for each, edited in zip(batch, results, strict=True):
            each.edited.set_result(edited)

    def _compute(self, uploads: Sequence[Upload]) -> list[Edited]:
        begun = time.monotonic()
        pictures = self._pipeline([upload.decode() for upload in uploads])
        edited = [Edited(_encode(picture), begun) for picture in pictures]
        self.busy_seconds += time.monotonic() - begun
        return edited


def make_app(batches: StaticBatches) -> FastAPI:
    """An app that is ready as soon as it runs."""
    app = FastAPI()

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(f"baseline:worker_busy_seconds_total {batches.busy_seconds}\n", media_type="text/plain")

    @app.post("/v1/images/edits")
    async def edits(request: Request) -> dict[str, object]:
        upload = await _read(request)
        edited = await batches.edit(upload)
        facts = {"ms": {"queue": 1e3 * (edited.begun - upload.came)}}
        return {"created": int(time.time()), "data": [{"b64_json": edited.png}], "stencil": facts}

    return app


def server_config(app: FastAPI, port: int) -> uvicorn.Config:
    return uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", timeout_keep_alive=KEEP_ALIVE_SECONDS)


async def _read(request: Request) -> Upload:
    form = await request.form()
    return Upload(
        prompt=_text(form, "prompt"),
        image=await _file(form, "image"),
        mask=await _file(form, "mask"),
        steps=int(_text(form, "num_inference_steps", str(DEFAULT_STEPS))),
        seed=int(_text(form, "seed", "0")),
        computed=_json(form, "computed_steps", tuple[int, ...]),
        first_block_cache=_json(form, "first_block_cache", float),
    )


def _text(form: FormData, name: str, default: str | None = None) -> str:
    value = form.get(name, default)
    if not isinstance(value, str):
        raise HTTPException(400, f"'{name}' is missing")
    return value


def _json(form: FormData, name: str, kind: type[Value]) -> Value | None:
    """None where the field is missing."""
    try:
        return msgspec.json.decode(_text(form, name), type=kind) if name in form else None
    except msgspec.DecodeError as error:
        raise HTTPException(400, f"'{name}' is not what it should be: {error}") from error


async def _file(form: FormData, name: str) -> bytes:
    value = form.get(name)
    if not isinstance(value, UploadFile):
        raise HTTPException(400, f"'{name}' is missing")
    return await value.read()


def _encode(picture: Image.Image) -> str:
    """base64 of a PNG with Pillow's default compression."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def main() -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1)
    parser.add_argument("--port", type=int, required=True, help="to listen on")
    parser.add_argument("--batch-size", type=int, default=1, help="most edits in one call of the pipeline")
    args: argparse.Namespace = parser.parse_args()
    pipeline = FillPipeline(args.model, args.dtype, args.threads)
    pipeline([WARM_UP])
    uvicorn.Server(server_config(make_app(StaticBatches(pipeline, args.batch_size)), args.port)).run()


if __name__ == "__main__":
    main()
