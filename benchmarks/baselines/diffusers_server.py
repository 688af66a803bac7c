"""diffusers behind FastAPI, as its guide "Create a server" has it: one pipeline, one call at a time.

`--batch-size 8` batches statically: edits that wait when a call ends, of the first one's size and step count, form the
next batch, which runs until all of it is done. `--first-block-cache 0.1` skips steps whose first block changed little.
Files are decoded and encoded in the pipeline's thread, between its calls.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from PIL import Image

from benchmarks.baselines.edit_app import Edited, Upload, add_flags, decode, encode, make_app, serve
from benchmarks.baselines.fill_pipeline import FillEdit, FillPipeline

WARM_UP = FillEdit("a red shirt", Image.new("RGB", (256, 256)), Image.new("L", (256, 256), 255), 2, 0)


@dataclass(eq=False)
class Waiting:
    """One edit, and the future of its result."""

    upload: Upload
    edited: asyncio.Future[Edited]
    key: tuple[object, ...]


class StaticBatches:
    """Batches of up to `batch_size`, one after the other, in the order their first edits came."""

    def __init__(self, pipeline: FillPipeline, batch_size: int) -> None:
        self.busy_seconds = 0.0
        self._pipeline = pipeline
        self._batch_size = batch_size
        self._waiting: deque[Waiting] = deque()
        self._thread = ThreadPoolExecutor(1)
        self._lock = asyncio.Lock()

    async def edit(self, upload: Upload) -> Edited:
        """The request that holds the lock runs the next batch, which is its own or begins with an earlier edit."""
        with Image.open(io.BytesIO(upload.image)) as header:
            key = (header.size, upload.steps)
        waiting = Waiting(upload, asyncio.get_running_loop().create_future(), key)
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
        edits = []
        for upload in uploads:
            image, mask = decode(upload)
            edits.append(FillEdit(upload.prompt, image, mask, upload.steps, upload.seed))
        pictures = self._pipeline(edits)
        edited = [Edited(encode(picture), begun) for picture in pictures]
        self.busy_seconds += time.monotonic() - begun
        return edited


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_flags(parser)
    parser.add_argument("--batch-size", type=int, default=1, help="most edits in one call of the pipeline")
    parser.add_argument("--first-block-cache", type=float, help="threshold of step skipping; none by default")
    args = parser.parse_args()
    pipeline = FillPipeline(args.model, args.dtype, args.threads, args.first_block_cache)
    pipeline([WARM_UP])
    serve(make_app(StaticBatches(pipeline, args.batch_size)), args.port)


if __name__ == "__main__":
    main()
