"""Stencil itself as an engine of `image_work`: AsyncEngine with its processes, without HTTP. Run as a process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks.load.workload import PROMPTS
from benchmarks.serving.image_work_run import Arrival, EngineArgs, Outcome, Ready, RunResult, engine_args, runs, say
from benchmarks.serving.image_work_uploads import Uploads
from core.config import EngineConfig, ImageConfig, ModelConfig, StencilConfig
from core.request import SamplingParams
from engine.async_engine import AsyncEngine
from engine.edit import EditInput
from engine.upload import BytesUpload


class Client:
    """Sends edits when they are due."""

    def __init__(self, engine: AsyncEngine, uploads: Uploads, steps: int) -> None:
        self._engine = engine
        self._uploads = uploads
        self._steps = steps
        self._num_runs = 0

    async def run(self, arrivals: Sequence[Arrival]) -> tuple[Outcome, ...]:
        """Outcomes, in the arrivals' order."""
        self._num_runs += 1
        started = time.monotonic()
        return tuple(await asyncio.gather(*(self._edit(arrival, started) for arrival in arrivals)))

    async def _edit(self, arrival: Arrival, started: float) -> Outcome:
        await asyncio.sleep(started + arrival.due - time.monotonic())
        sent = time.monotonic()
        request_id = f"{self._num_runs}-{arrival.seed}"
        async with self._engine.edit(request_id, self._input(arrival)) as outputs:
            (output,) = [output async for output in outputs]
            done = time.monotonic()
        assert output.report is not None
        ms = output.report.ms
        return Outcome(
            due=arrival.due,
            begun=sent - started + (ms["preprocess"] + ms["queue"]) / 1e3,
            decoded=done - started - ms["postprocess"] / 1e3,
            done=done - started,
        )

    def _input(self, arrival: Arrival) -> EditInput:
        image, mask = self._uploads[arrival.upload]
        return EditInput(
            prompt=PROMPTS[arrival.seed % len(PROMPTS)],
            sampling=SamplingParams(num_inference_steps=self._steps, seed=arrival.seed),
            image=BytesUpload(image),
            mask=BytesUpload(mask),
            base64=True,
        )


async def _serve(args: EngineArgs) -> None:
    model = ModelConfig(model=args.model, dtype=args.dtype, threads=args.threads)
    config = StencilConfig(
        engine=EngineConfig(models=(model,)), image=ImageConfig(image_workers=args.image_workers), max_queue=4096
    )
    engine = AsyncEngine(config)
    await engine.start()
    try:
        await engine.ready()
        uploads = Uploads(Path(args.folder))
        client = Client(engine, uploads, args.steps)
        await client.run(uploads.each_once())
        say(Ready(next(iter(engine.models.values())).device))
        todo = runs()
        while (run := await asyncio.to_thread(next, todo, None)) is not None:
            say(RunResult(await client.run(run.arrivals)))
    finally:
        await engine.shutdown(drain_seconds=0.0)


if __name__ == "__main__":
    uvloop.run(_serve(engine_args()))
