"""Draws training pictures in processes of their own, ahead of the training that uses them."""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.pool import AsyncResult
from typing import Generic, TypeVar

Drawn = TypeVar("Drawn")
AHEAD = 4  # tasks given out per process
SEEDS_PER_TASK = 16


class Drawers(Generic[Drawn]):
    """Applies `draw` to the seeds from `first_seed` on, in order. With no processes it draws when it is asked."""

    def __init__(self, draw: Callable[[int], Drawn], first_seed: int, processes: int) -> None:
        self._draw, self._next_seed = draw, first_seed
        self._seeds_per_task = SEEDS_PER_TASK if processes else 1
        self._tasks: deque[AsyncResult[list[Drawn]]] = deque()
        self._ahead = processes * AHEAD
        self._processes = multiprocessing.get_context("spawn").Pool(processes) if processes else None

    def take(self) -> list[Drawn]:
        """The pictures of the next seeds; waits until they are drawn."""
        if self._processes is None:
            return [self._draw(self._take_seeds()[0])]
        while len(self._tasks) < self._ahead:
            self._tasks.append(self._processes.apply_async(partial(draw_all, self._draw, self._take_seeds())))
        return self._tasks.popleft().get()

    @property
    def ready(self) -> bool:
        """Whether `take` need not wait."""
        return bool(self._tasks) and self._tasks[0].ready()

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.terminate()
            self._processes.join()

    def _take_seeds(self) -> Sequence[int]:
        first = self._next_seed
        self._next_seed += self._seeds_per_task
        return range(first, self._next_seed)


def draw_all(draw: Callable[[int], Drawn], seeds: Sequence[int]) -> list[Drawn]:
    return [draw(seed) for seed in seeds]


def spare_processes(on_gpu: bool) -> int:
    """Two thirds of the CPUs beside a GPU, so that two stages can share a machine with what compiles and launches
    kernels; none on a CPU, where training needs them itself.
    """
    return max(1, (os.cpu_count() or 2) * 2 // 3) if on_gpu else 0
