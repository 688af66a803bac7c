"""Bench: what every section needs: the device, sizes, the file of results and the time that is left."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from benchmarks.gpu.report import Report
from benchmarks.gpu.sizes import Size

Call = Callable[[], object]

COMPILE_SECONDS = 60.0
"""Nothing is compiled with less left."""
T = TypeVar("T")


@dataclass(frozen=True)
class Bench:
    """minutes: that the whole run may take."""

    device: torch.device
    dtype: torch.dtype
    size: Size
    report: Report
    minutes: float

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

    def median(self, call: Call) -> float:
        """Seconds of a call, the first one not counted."""
        call()
        return statistics.median(self.seconds(call) for _ in range(self.size.rounds))

    def medians(self, calls: Mapping[T, Call], rounds: int | None = None) -> dict[T, float]:
        """Likewise of several, which take turns. rounds: at most, where each takes long."""
        seconds: dict[T, list[float]] = {name: [] for name in calls}
        for round_ in range(min(self.size.rounds, rounds or self.size.rounds) + 1):
            for name, call in calls.items():
                taken = self.seconds(call)
                if round_:
                    seconds[name].append(taken)
        return {name: statistics.median(taken) for name, taken in seconds.items()}

    def launch_ms(self, call: Call) -> float:
        """Milliseconds until a call returns, when the device has yet to compute what it was given; median."""
        return 1e3 * statistics.median(self._launch_seconds(call) for _ in range(self.size.rounds))

    def _launch_seconds(self, call: Call) -> float:
        self.wait()
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def is_usable(self) -> bool:
        """Whether the device still computes: a kernel that failed has failed all that come after it."""
        try:
            self.wait()
        except RuntimeError:
            return False
        return True

    def make(self, module: Callable[[], Any]) -> Any:
        """A module of random weights, made on the device and in the dtype that it stays in: 12 billion parameters take
        no detour by way of the host."""
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
        """Give back what no variable refers to any more."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
