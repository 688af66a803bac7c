"""Stencil's scheduler and worker with image work in line, behind FastAPI: continuous batching without image processors.

One thread decodes, steps and encodes; denoising stands still while it decodes and encodes (FlashPS, section 4.3: the
strawman). With `--static`, edits that wait form a batch, and the next one begins when all of them have left.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import threading
import time

from benchmarks.baselines.edit_app import Edited, Upload, add_flags, make_app, serve
from benchmarks.baselines.inline_engine import MAX_NUM_SEQS, InlineEdit, InlineEngine, RefusedUploadError

Waiting = tuple[Upload, asyncio.AbstractEventLoop, "asyncio.Future[Edited]"]


class InlineServer:
    """The engine's thread, and the requests that wait for it."""

    def __init__(self, engine: InlineEngine, *, is_static: bool) -> None:
        self.busy_seconds = 0.0
        self._engine = engine
        self._serve = self._serve_batch if is_static else self._serve_continuously
        self._mailbox: queue.SimpleQueue[Waiting] = queue.SimpleQueue()
        self._running: dict[InlineEdit, Waiting] = {}
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    async def edit(self, upload: Upload) -> Edited:
        loop = asyncio.get_running_loop()
        edited: asyncio.Future[Edited] = loop.create_future()
        self._mailbox.put((upload, loop, edited))
        return await edited

    def _run(self) -> None:
        while True:
            waiting = self._mailbox.get()
            start = time.monotonic()
            self._begin(waiting)
            self._serve()
            self.busy_seconds += time.monotonic() - start

    def _serve_continuously(self) -> None:
        """Edits join as soon as the batch has a place, and leave when they are done."""
        while self._running:
            self._fill()
            for edit in self._engine.step():
                self._end(edit)

    def _serve_batch(self) -> None:
        self._fill()
        decoded = list[InlineEdit]()
        while len(decoded) < len(self._running):
            decoded += self._engine.step()
        for edit in decoded:
            self._end(edit)

    def _fill(self) -> None:
        while len(self._running) < MAX_NUM_SEQS and not self._mailbox.empty():
            self._begin(self._mailbox.get())

    def _begin(self, waiting: Waiting) -> None:
        upload, loop, edited = waiting
        try:
            edit = self._engine.begin(upload)
        except RefusedUploadError as error:
            loop.call_soon_threadsafe(edited.set_exception, error)
            return
        self._running[edit] = waiting

    def _end(self, edit: InlineEdit) -> None:
        _, loop, edited = self._running.pop(edit)
        png = self._engine.end(edit).decode()
        assert edit.begun is not None
        assert edit.decoded is not None
        seconds = {"inference": edit.decoded - edit.begun, "postprocess": time.monotonic() - edit.decoded}
        ms = {name: 1e3 * value for name, value in seconds.items()}
        facts = {"mask_ratio": edit.mask_ratio, "interruptions": edit.interruptions}
        facts |= {"interrupted_ms": 1e3 * edit.interrupted_seconds}
        loop.call_soon_threadsafe(edited.set_result, Edited(png, edit.begun, ms, facts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_flags(parser)
    parser.add_argument("--static", action="store_true", help="batches whose edits begin and leave together")
    args = parser.parse_args()
    engine = InlineEngine(args.model, args.dtype, args.threads)
    serve(make_app(InlineServer(engine, is_static=args.static)), args.port)


if __name__ == "__main__":
    main()
