"""Shared by all sections: the device, sizes, the file of results, and clocks."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import torch

from benchmarks.gpu.graphs import GraphChoice
from benchmarks.gpu.report import Report
from benchmarks.gpu.sizes import Size
from benchmarks.turns import medians

Call = Callable[[], object]

COMPILE_SECONDS = 40.0  # nothing is compiled with less time left


@dataclass(frozen=True)
class Bench:
    """minutes: time limit of the whole run."""

    device: torch.device
    dtype: torch.dtype
    size: Size
    report: Report
    minutes: float
    graphs: GraphChoice = field(default_factory=GraphChoice)

    @property
    def seconds_left(self) -> float:
        return 60 * self.minutes - self.report.seconds

    def seconds(self, call: Call) -> float:
        """One call, from an idle device until it is idle again."""
        self.wait()
        started = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - started

    def median(self, call: Call, rounds: int | None = None) -> float:
        """Seconds of a call."""
        return self.medians({"": call}, rounds)[""]

    def medians(self, calls: Mapping[str, Call], rounds: int | None = None) -> dict[str, float]:
        """Median seconds of calls in turns, after a first round that does not count. rounds: a limit for long calls."""
        number = min(self.size.rounds, rounds or self.size.rounds)
        return medians({name: partial(self.seconds, call) for name, call in calls.items()}, number)

    @property
    def free_bytes(self) -> int:
        """Free bytes of the device's memory; on a CPU more than anything needs."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 2**62

    def launch_ms(self, call: Call) -> float:
        """Milliseconds until a call returns, with the device's work still queued; median."""
        return 1e3 * statistics.median(self._launch_seconds(call) for _ in range(self.size.rounds))

    def _launch_seconds(self, call: Call) -> float:
        self.wait()
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def is_usable(self) -> bool:
        """Whether the device still works: after a failed kernel all later ones fail."""
        try:
            self.wait()
        except RuntimeError:
            return False
        return True

    def make(self, module: Callable[[], Any]) -> Any:
        """A module of random weights, made on the device: 12 billion parameters never pass through the host."""
        before = torch.get_default_dtype()
        torch.manual_seed(0)
        torch.set_default_dtype(self.dtype)
        try:
            with torch.inference_mode(False), self.device:
                return module().eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(before)

    def draw(self, *shape: int) -> torch.Tensor:
        """Normal numbers on the device."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def clear(self) -> None:
        """Free unused memory."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def rotating(calls: Sequence[Call]) -> Call:
    """Makes the next of these calls each time, and begins again after the last."""
    turn = cycle(calls)

    def call() -> object:
        return next(turn)()

    return call
