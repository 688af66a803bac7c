"""LatencyTable: measured latencies of one op by batch size and computed tokens, L(b, a) (NeuStream, section 4.1)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

Measured = tuple[float, float]
"""(size, seconds)"""


def interpolated(points: Sequence[Measured], size: float) -> float:
    """Seconds at a size, from one or more points in ascending order of size: linear between them and beyond the
    largest, below the smallest as at the smallest. From one point alone, in proportion to the size.
    """
    if len(points) == 1:
        ((only, seconds),) = points
        return seconds * size / only
    if size <= points[0][0]:
        return points[0][1]
    after = min(bisect_left(points, (size,)), len(points) - 1)
    (low, below), (high, above) = points[after - 1], points[after]
    return below + (above - below) * (size - low) / (high - low)


class LatencyTable:
    """Immutable. Batches are given as the number of their rows and the mean tokens that a row computes."""

    def __init__(self, measured: Iterable[tuple[int, float, float]]) -> None:
        """measured: (rows, mean tokens of a row, seconds); of equal batches the mean counts. Raises ValueError for
        none, and for a size or time that is not above 0.
        """
        batches: dict[float, dict[int, list[float]]] = {}
        for rows, tokens, seconds in measured:
            if min(rows, tokens, seconds) <= 0:
                raise ValueError(f"a latency table needs sizes and times above 0, not {(rows, tokens, seconds)}")
            batches.setdefault(tokens, {}).setdefault(rows, []).append(seconds)
        if not batches:
            raise ValueError("a latency table needs one or more measurements")
        self._levels = {
            tokens: [(float(rows), sum(all_) / len(all_)) for rows, all_ in sorted(by_rows.items())]
            for tokens, by_rows in sorted(batches.items())
        }
        self.tokens = tuple(self._levels)
        """The tokens per row that were measured, ascending."""
        self.largest = min(int(line[-1][0]) for line in self._levels.values())
        """The largest number of rows that was measured with all of these."""

    def seconds(self, rows: int, tokens: float) -> float | None:
        """Latency of a batch, linear between the sizes measured; None for one outside of these."""
        if not (self.tokens[0] <= tokens <= self.tokens[-1] and rows <= self.largest):
            return None
        after = bisect_left(self.tokens, tokens)
        high = self.tokens[after]
        above = interpolated(self._levels[high], rows)
        if high == tokens:
            return above
        low = self.tokens[after - 1]
        below = interpolated(self._levels[low], rows)
        return below + (above - below) * (tokens - low) / (high - low)


def largest_batch(seconds: Callable[[int], float], share: float, most: int) -> int:
    """The batch cap of an op: the largest batch, of at most `most` requests, whose latency is within the op's share of
    the objective (Algorithm 1, line 3); 0 if none is. seconds: latency by number of requests, which may fall as that
    grows: measured latencies do.
    """
    return next((number for number in range(most, 0, -1) if seconds(number) <= share), 0)
