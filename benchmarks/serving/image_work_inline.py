"""The one-process engine of `image_work`: static or continuous batches, image work in line. Run as a process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from benchmarks.baselines.inline_engine import MAX_NUM_SEQS, InlineEdit, InlineEngine, Upload
from benchmarks.load.workload import PROMPTS
from benchmarks.serving.image_work_run import (
    Arrival,
    EngineArgs,
    Outcome,
    Ready,
    Run,
    RunResult,
    engine_args,
    runs,
    say,
)
from benchmarks.serving.image_work_uploads import Uploads


class Server:
    """The engine on the clock of a run."""

    def __init__(self, args: EngineArgs) -> None:
        self.uploads = Uploads(Path(args.folder))
        self.engine = InlineEngine(args.model, args.dtype, args.threads)
        self._steps = args.steps
        self._start = 0.0
        self._arrivals: dict[InlineEdit, Arrival] = {}

    def start_clock(self) -> None:
        self._start = time.monotonic()

    def is_due(self, arrivals: deque[Arrival]) -> bool:
        return bool(arrivals) and arrivals[0].due <= time.monotonic() - self._start

    def sleep_until(self, arrival: Arrival) -> None:
        time.sleep(max(0.0, self._start + arrival.due - time.monotonic()))

    def begin(self, arrival: Arrival) -> None:
        image, mask = self.uploads[arrival.upload]
        prompt = PROMPTS[arrival.seed % len(PROMPTS)]
        edit = self.engine.begin(Upload(image, mask, "alpha", prompt, self._steps, arrival.seed))
        self._arrivals[edit] = arrival

    def end(self, edit: InlineEdit) -> Outcome:
        self.engine.end(edit)
        done = time.monotonic()
        assert edit.begun is not None
        assert edit.decoded is not None
        return Outcome(
            due=self._arrivals.pop(edit).due,
            begun=edit.begun - self._start,
            decoded=edit.decoded - self._start,
            done=done - self._start,
            interruptions=edit.interruptions,
            interrupted_seconds=edit.interrupted_seconds,
        )


def serve_continuously(server: Server, arrivals: deque[Arrival], room: int) -> Iterator[Outcome]:
    """Whoever is due is prepared as soon as the batch has a place, and joins at the next step; whoever is through is
    encoded at once, and leaves.
    """
    engine = server.engine
    while arrivals or engine.num_running:
        if not engine.num_running:
            server.sleep_until(arrivals[0])
        while engine.num_running < room and server.is_due(arrivals):
            server.begin(arrivals.popleft())
        for edit in engine.step():
            yield server.end(edit)


def serve_in_static_batches(server: Server, arrivals: deque[Arrival], room: int) -> Iterator[Outcome]:
    """Those who are due, as many as there is room for, form a batch; the next one begins when all of them have left."""
    engine = server.engine
    while arrivals:
        server.sleep_until(arrivals[0])
        while engine.num_running < room and server.is_due(arrivals):
            server.begin(arrivals.popleft())
        num_denoising, decoded = engine.num_running, list[InlineEdit]()
        while len(decoded) < num_denoising:
            decoded += engine.step()
        for edit in decoded:
            yield server.end(edit)


def _serve(server: Server, run: Run) -> RunResult:
    batching = {"static": serve_in_static_batches, "continuous": serve_continuously}[run.batching]
    server.start_clock()
    return RunResult(tuple(batching(server, deque(run.arrivals), MAX_NUM_SEQS)))


def _main(args: EngineArgs) -> None:
    server = Server(args)
    _serve(server, Run("continuous", server.uploads.each_once()))
    say(Ready(server.engine.device))
    for run in runs():
        say(_serve(server, run))


if __name__ == "__main__":
    _main(engine_args())
