"""What a device does during a call, as PyTorch's profiler sees it: kernels, copies, and launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bench import Bench, Call
from benchmarks.gpu.report import Figures

NAME_LENGTH = 90
"""Characters that are kept of a kernel's name: those of templates have hundreds."""


class Work(NamedTuple):
    """A kernel, copy or fill. start, end: in seconds of one clock."""

    name: str
    start: float
    end: float


def traced(bench: Bench, call: Call) -> list[Work]:
    """The work of one call in the order of its starts; on a CPU, PyTorch's operators instead of kernels."""
    is_cuda = bench.device.type == "cuda"
    bench.wait()
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as trace:
        call()
        bench.wait()
    return work_of(trace, DeviceType.CUDA if is_cuda else DeviceType.CPU)


def work_of(trace: profile, kind: DeviceType) -> list[Work]:
    """The events of a device of this kind. On a GPU each is one launch: a kernel, a copy or a fill."""
    return sorted(
        (
            Work(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in trace.events() or ()
            if event.device_type == kind and (kind == DeviceType.CUDA or event.name.startswith("aten::"))
        ),
        key=lambda work: work.start,
    )


def by_kernel(works: Iterable[Work], number: int) -> list[Figures]:
    """The kernels that take most of the time: name, calls and milliseconds of each; the rest under one name."""
    calls: dict[str, list[float]] = {}
    for work in works:
        calls.setdefault(work.name[:NAME_LENGTH], []).append(1e3 * (work.end - work.start))
    ordered = sorted(calls.items(), key=lambda item: -sum(item[1]))
    rest = [ms for _, each in ordered[number:] for ms in each]
    rows = [*ordered[:number], *([("others", rest)] if rest else [])]
    return [{"name": name, "calls": len(each), "ms": sum(each)} for name, each in rows]


def busy_ms(works: Sequence[Work]) -> float:
    """Milliseconds of all work, which overlaps only where copies run beside kernels."""
    return 1e3 * sum(work.end - work.start for work in works)
