"""Cores: the processor time of a machine, which ranks and other processes share evenly."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from benchmarks.simulation.clock import Clock


class Cores:
    """Every process that computes has one core, or an even share of them all if there are fewer. Batches of ranks take
    as much longer as when they begin; tasks of other processes (`run`) with every task that begins or ends.
    """

    def __init__(self, clock: Clock, number: float, num_busy_ranks: Callable[[], int], num_others: int) -> None:
        """num_others: processes that do tasks, one at a time."""
        self._clock, self._number, self._num_busy_ranks, self._num_others = clock, number, num_busy_ranks, num_others
        self._tasks: dict[int, tuple[float, Callable[[], None]]] = {}  # seconds left, and what to call when it is done
        self._waiting: list[tuple[float, int, float, Callable[[], None]]] = []  # heap: order, id, and as for `_tasks`
        self._ids = count()
        self._since, self._slowness = 0.0, 1.0  # of the tasks, since then
        self._changes = 0

    def slowness(self, num_ranks: int) -> float:
        """Time that passes while so many ranks and all tasks compute, as a multiple of what each would take alone."""
        return self.slowness_of(num_ranks + len(self._tasks))

    def slowness_of(self, num_processes: int) -> float:
        """The same of so many processes."""
        return max(1.0, num_processes / self._number)

    def are_all_taken(self, num_ranks: int) -> bool:
        """Whether so many ranks and all tasks leave no core free."""
        return num_ranks + len(self._tasks) >= self._number

    def run(self, seconds: float, done: Callable[[], None], order: float) -> None:
        """Run a task of so much processor time, and then call `done`. Of tasks that wait for a process the one with the
        least order begins first.
        """
        self._advance()
        heappush(self._waiting, (order, next(self._ids), seconds, done))
        self._go_on()

    def _advance(self) -> None:
        passed = (self._clock.now - self._since) / self._slowness
        self._tasks = {name: (seconds - passed, done) for name, (seconds, done) in self._tasks.items()}

    def _go_on(self) -> None:
        """Begin those that find a process, and wait for the task that ends first, at the present speed."""
        while self._waiting and len(self._tasks) < self._num_others:
            _, name, seconds, done = heappop(self._waiting)
            self._tasks[name] = seconds, done
        self._since, self._slowness = self._clock.now, self.slowness(self._num_busy_ranks())
        self._changes += 1
        if self._tasks:
            name = min(self._tasks, key=lambda name: self._tasks[name][0])
            number = self._changes
            self._clock.after(max(0.0, self._tasks[name][0]) * self._slowness, lambda: self._end(name, number))

    def _end(self, name: int, number: int) -> None:
        if number == self._changes:  # otherwise others have begun or ended meanwhile
            self._advance()
            _, done = self._tasks.pop(name)
            self._go_on()
            done()
