"""The reference: a loop over diffusers' own FluxFillPipeline, in a process of its own, told by its parent when to run.

Protocol, one JSON object a line. First the child says how many floating-point operations an edit takes; then each `Job`
on standard input is answered by a `Turn`. The pipeline gets decoded pictures and its results are not encoded, so file
formats cost it nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from PIL import Image, ImageOps

from benchmarks.baselines.fill_pipeline import FillEdit, FillPipeline
from benchmarks.load.server import ROOT
from benchmarks.load.workload import IMAGE, MASK, EditSpec, edit_specs

DTYPES = ("float32", "bfloat16", "float16")

Edit = Callable[[EditSpec], object]


@dataclass(frozen=True)
class Job:
    """So many edits, one after the other."""

    first: int
    number: int
    steps: int


@dataclass(frozen=True)
class Turn:
    """seconds: the job took. peak_flops: per second, of a large matrix product of the same dtype right after it."""

    seconds: float
    peak_flops: float


class PipelineLoop:
    """The parent's side. flop_per_edit: of an edit that computes every token; a multiply-add counts two."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.flop_per_edit: float = self._read()["flop_per_edit"]

    def run(self, job: Job) -> Turn:
        """Do the job and wait for it. Raises RuntimeError if the child is gone."""
        assert self._process.stdin is not None
        print(json.dumps(asdict(job)), file=self._process.stdin, flush=True)
        return Turn(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the diffusers loop left with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def start_pipeline_loop(model: str, dtype: str, threads: int, steps: int) -> Iterator[PipelineLoop]:
    """A loaded and warmed pipeline; its process ends on leaving."""
    command = [sys.executable, "-m", "benchmarks.serving.pipeline_loop", model, dtype, str(threads), str(steps)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield PipelineLoop(process)
        finally:
            process.terminate()


def main(model: str, dtype: str, threads: int, steps: int) -> None:
    import torch  # only the child needs it

    pipeline = FillPipeline(model, dtype, threads)
    warm_up = edit_specs(0, 1, steps)[0]
    edit = _example_edits(pipeline)
    edit(warm_up)
    _say({"flop_per_edit": _count_flop(edit, warm_up)})
    for line in sys.stdin:
        job = Job(**json.loads(line))
        start = time.perf_counter()
        for spec in edit_specs(job.first, job.number, job.steps):
            edit(spec)
        seconds = time.perf_counter() - start
        _say(asdict(Turn(seconds, _peak_flops(getattr(torch, dtype)))))


def _example_edits(pipeline: FillPipeline) -> Edit:
    """One edit of the example at a time, its files decoded beforehand."""
    image = Image.open(IMAGE).convert("RGB")
    mask = ImageOps.invert(Image.open(MASK).getchannel("A"))  # diffusers: white = edit

    def edit(spec: EditSpec) -> None:
        pipeline([FillEdit(spec.prompt, image, mask, spec.num_inference_steps, spec.seed)])

    return edit


def _count_flop(edit: Edit, spec: EditSpec) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        edit(spec)
    return float(counter.get_total_flops())


def _peak_flops(dtype: Any, side: int = 2048, seconds: float = 1.0) -> float:
    """Of the faster of PyTorch's two matrix products: on some processors MKL reaches half of what oneDNN does."""
    import torch

    a, b = (torch.randn(side, side).to(dtype) for _ in range(2))
    products = [lambda: torch.mm(a, b)]
    if torch.backends.mkldnn.is_available() and dtype is not torch.float16:
        products.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
    return 2.0 * side**3 * max(_rate(product, seconds) for product in products)


def _rate(call: Callable[[], object], seconds: float) -> float:
    """Calls per second, after a first one."""
    call()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        call()
        calls += 1
    return calls / (time.perf_counter() - start)


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
