"""EngineLanes: the requests that make their steps on each rank of one engine, as its router predicts them.

A rank is a lane: its requests make each step together. A newcomer gets a slot as soon as the engine has one, in the
lane where least work is left, and keeps its lane. One that gains by several ranks is in as many lanes at once: where
two are in the same lanes, each step takes as long as both of theirs, as if they shared the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from core.costs.load_report import RequestLoad
from core.handles import RankIds

DONE = 1e-9
"""Steps; a request with less left is done, but for rounding."""


@dataclass(slots=True)
class Lane:
    """The requests of one rank at one time."""

    rank: int
    time: float  # when the next step can begin, in seconds of the caller's clock
    made: float = 0.0  # steps made by then
    seconds: float = 0.0  # that all requests add to a step
    # A heap: (the step after which a request is done, its number in the engine, seconds that it adds to a step).
    slots: list[tuple[float, int, float]] = field(default_factory=list)
    # Sums over the requests, so that `work` is no loop.
    _ends: float = 0.0  # the steps after which they are done
    _weighted_ends: float = 0.0  # these, by the seconds that they add to a step

    def work(self, base: float) -> tuple[float, int, int]:
        """Sort key for newcomers: when all steps were made, if they were made one after the other. base: the constant
        part of a step, in seconds.
        """
        left = self._weighted_ends - self.made * self.seconds
        left += base * (self._ends - self.made * len(self.slots))
        return self.time + max(left, 0.0), len(self.slots), self.rank

    def next_end(self, base: float) -> float:
        """When the first of its requests is done."""
        return self.time + (self.slots[0][0] - self.made) * (base + self.seconds) if self.slots else inf

    def left(self) -> list[tuple[float, float]]:
        """(steps left, seconds added to each of them) of its requests, most steps first."""
        rest = ((end - self.made, seconds) for end, _, seconds in self.slots)
        return sorted((each for each in rest if each[0] > DONE), reverse=True)

    def add(self, number: int, steps: float, seconds: float) -> None:
        end = self.made + steps
        heappush(self.slots, (end, number, seconds))
        self.seconds += seconds
        self._ends += end
        self._weighted_ends += end * seconds

    def pass_until(self, time: float, base: float) -> None:
        """Let its requests make steps until this time at their present pace, of which none is done before."""
        if time > self.time:
            if self.slots and base + self.seconds > 0:
                self.made += (time - self.time) / (base + self.seconds)
            self.time = time

    def end_first(self, base: float) -> int:
        """Let its requests make steps until the first of them is done; its number."""
        self.time, self.made = self.next_end(base), self.slots[0][0]
        return self.drop_first()

    def drop_first(self) -> int:
        """Drop the request that is done first; its number."""
        number = self.slots[0][1]
        self._forget(*heappop(self.slots))
        return number

    def drop(self, number: int) -> None:
        """Drop a request, if it is there."""
        for slot in [slot for slot in self.slots if slot[1] == number]:
            self.slots.remove(slot)
            heapify(self.slots)
            self._forget(*slot)

    def _forget(self, end: float, _number: int, seconds: float) -> None:
        self.seconds -= seconds
        self._ends -= end
        self._weighted_ends -= end * seconds
        if not self.slots:
            self.made = self.seconds = self._ends = self._weighted_ends = 0.0


class EngineLanes:
    """Of one engine. Times are seconds of the caller's clock."""

    def __init__(
        self, ranks: RankIds, num_slots: int, base_seconds: float, loads: Sequence[RequestLoad] = (), now: float = 0.0
    ) -> None:
        """ranks: at least one. num_slots: requests of the engine that make steps at one time. base_seconds: the
        constant part of a step. loads: the engine's requests, most urgent first, as of the start of steps that their
        `steps_left` do not count.
        """
        self._num_slots, self.base_seconds = num_slots, base_seconds
        self._lanes = [Lane(rank, now) for rank in ranks]
        self._free_at = now  # when the engine has a slot
        self._held = set[int]()  # numbers of the requests that have one
        self._num_added = 0
        in_line = [load for load in loads if load.steps_left]
        for load in in_line[:num_slots]:
            self._add(load)
        for lane in self._lanes:
            lane.time += base_seconds + lane.seconds if lane.slots else 0.0
        for load in loads:
            if not load.steps_left:
                self._lanes_for(load)[0].time += load.other_seconds
        self._free_slot()
        for load in in_line[num_slots:]:
            self._add(load)
            self._free_slot()

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    def line_up(self, load: RequestLoad, now: float) -> None:
        """Append a request to the engine's queue."""
        for lane in self._lanes:
            lane.pass_until(now, self.base_seconds)
            while lane.slots and lane.slots[0][0] <= lane.made + DONE:
                self._end(lane.drop_first())
        self._free_at = max(self._free_at, now)
        self._add(load)
        self._free_slot()

    def delay(self, seconds: float) -> None:
        """Let all slots be free so much later, with the same requests in the others."""
        self._free_at += seconds
        for lane in self._lanes:
            lane.time += seconds

    def next_lane(self, ranks: RankIds = (), degree: int = 1) -> Lane:
        """The lane of a newcomer, when the engine has a slot for it; of several the one where most is left. ranks:
        those that can make its steps, (): all. degree: lanes that it is in.
        """
        lanes = self._in_order(ranks)
        return lanes[min(degree, len(lanes)) - 1]

    # ------------------------------------------------------------------------------------------------- inside

    def _in_order(self, ranks: RankIds) -> list[Lane]:
        """The lanes of these ranks as of the time when a slot is free, those with least work first."""
        lanes = self._lanes
        if len(lanes) > 1:
            lanes = (ranks and [lane for lane in lanes if lane.rank in ranks]) or [*lanes]
        for lane in lanes:
            lane.pass_until(self._free_at, self.base_seconds)
        if len(lanes) > 1:
            lanes.sort(key=lambda lane: lane.work(self.base_seconds))
        return lanes

    def _lanes_for(self, load: RequestLoad) -> Sequence[Lane]:
        """The lanes where a request makes its steps, or is to make them."""
        at_home = load.ranks and [lane for lane in self._lanes if lane.rank in load.ranks]
        return at_home or self._in_order(())[: load.degree]

    def _add(self, load: RequestLoad) -> None:
        """Give a request a slot, with its encoding and decoding spread over its steps."""
        seconds = load.step_seconds + load.other_seconds / load.steps_left
        for lane in self._lanes_for(load):
            lane.pass_until(self._free_at, self.base_seconds)
            lane.add(self._num_added, float(load.steps_left), seconds)
        self._held.add(self._num_added)
        self._num_added += 1

    def _free_slot(self) -> None:
        """Let time pass until a slot is free."""
        while len(self._held) >= self._num_slots:
            lane = self._lanes[0]
            if len(self._lanes) > 1:
                lane = min(self._lanes, key=lambda lane: lane.next_end(self.base_seconds))
            self._end(lane.end_first(self.base_seconds))
            self._free_at = max(self._free_at, lane.time)

    def _end(self, number: int) -> None:
        self._held.discard(number)
        if len(self._lanes) > 1:
            for lane in self._lanes:
                lane.drop(number)
