"""What the engines of `image_work` are asked to do and what they answer: one JSON object a line, over a pipe.

An engine lives in a process of its own. It says `Ready` once, and answers every `Run` with a `RunResult`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import msgspec

from benchmarks.load.process_tree import cpu_seconds
from benchmarks.load.server import ROOT

Kind = Literal["inline", "stencil"]
Batching = Literal["static", "continuous", "disaggregated"]


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True):
    """How to start an engine. threads: torch threads of what denoises. folder: where the uploads lie. image_workers: of
    the disaggregated engine."""

    model: str
    dtype: str
    threads: int
    steps: int
    image_workers: int
    folder: str


class Arrival(msgspec.Struct, frozen=True):
    """One edit. due: seconds after the start of its run. upload: see `Uploads`."""

    due: float
    upload: int
    seed: int


class Run(msgspec.Struct, frozen=True):
    """Serve these edits, in the order they are due."""

    batching: Batching
    arrivals: tuple[Arrival, ...]


class Outcome(msgspec.Struct, frozen=True):
    """When things happened to one edit, in seconds after the start of its run.

    begun: its inference, which is text and image encoding, denoising and decoding by the model. decoded: inference is
    over. done: its file is there. interruptions: how often its inference was paused for the image work of others, and
    for how many seconds in all.
    """

    due: float
    begun: float
    decoded: float
    done: float
    interruptions: int = 0
    interrupted_seconds: float = 0.0

    @property
    def latency(self) -> float:
        return self.done - self.due

    @property
    def wait(self) -> float:
        """Until inference began: queueing and preparation."""
        return self.begun - self.due

    @property
    def inference(self) -> float:
        return self.decoded - self.begun

    @property
    def wait_for_file(self) -> float:
        """From the model's pixels to the encoded file."""
        return self.done - self.decoded


class Ready(msgspec.Struct, frozen=True):
    """The engine is loaded and has edited every upload once."""

    device: str


class RunResult(msgspec.Struct, frozen=True):
    outcomes: tuple[Outcome, ...]


class EngineProcess:
    """An engine seen from the benchmark."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.device = msgspec.json.decode(self._read(), type=Ready).device

    def run(self, batching: Batching, arrivals: Sequence[Arrival]) -> tuple[tuple[Outcome, ...], float]:
        """Outcomes, and the processor time that the engine's processes took for them. Raises RuntimeError if it is
        gone."""
        used = cpu_seconds(self._process.pid)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(Run(batching, tuple(arrivals))) + b"\n")
        self._process.stdin.flush()
        outcomes = msgspec.json.decode(self._read(), type=RunResult).outcomes
        return outcomes, cpu_seconds(self._process.pid) - used

    def _read(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine left with status {self._process.wait()}")
        return line


@contextmanager
def start_engine(kind: Kind, args: EngineArgs) -> Iterator[EngineProcess]:
    """An engine that is ready; it ends on leaving."""
    module = f"benchmarks.image_work_{kind}"
    command = [sys.executable, "-m", module, msgspec.json.encode(args).decode()]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield EngineProcess(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it leaves then


def runs() -> Iterator[Run]:
    """In an engine's process: what it is asked to do, until nothing more will be."""
    for line in sys.stdin.buffer:
        yield msgspec.json.decode(line, type=Run)


def say(answer: Ready | RunResult) -> None:
    """In an engine's process."""
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def engine_args() -> EngineArgs:
    """In an engine's process: how it was started."""
    return msgspec.json.decode(sys.argv[1].encode(), type=EngineArgs)
