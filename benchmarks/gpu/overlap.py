"""The share of copies' time during which something is computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.gpu.trace import Work

Span = tuple[float, float]
"""Begin and end, in seconds of one clock."""

COPY = "memcpy htod"  # the profiler's name for a copy from the host; no kernel's name contains it


def hidden_share(copies: Iterable[Span], compute: Iterable[Span]) -> float:
    """Share of the copies' time, 0..1, during which something is computed; 1 where nothing was copied."""
    copied, computed = merged(copies), merged(compute)
    total = sum(end - start for start, end in copied)
    return sum(_common(span, computed) for span in copied) / total if total else 1.0


def merged(spans: Iterable[Span]) -> list[Span]:
    """The spans' time in disjoint spans, ascending."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def _common(span: Span, others: Sequence[Span]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)


def device_spans(works: Iterable[Work]) -> tuple[list[Span], list[Span]]:
    """Copies from the host, and kernels, of what a GPU has done."""
    copies: list[Span] = []
    kernels: list[Span] = []
    for work in works:
        name = work.name.lower()
        if COPY in name:
            copies.append((work.start, work.end))
        elif not name.startswith(("memcpy", "memset")):
            kernels.append((work.start, work.end))
    return copies, kernels
