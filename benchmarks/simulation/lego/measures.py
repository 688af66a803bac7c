"""Measures: what is read off a system at a site: attainment, and what it holds, or needs, at 90 %.

What is searched for is on a grid, so that it does not depend on where the search starts if what is below it is held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import floor, log
from statistics import fmean
from typing import NamedTuple

from benchmarks.simulation.lego.arrivals import Arrivals
from benchmarks.simulation.lego.serving import Forecast, Served, serve
from benchmarks.simulation.lego.site import Site
from benchmarks.simulation.lego.systems import Offered

TARGET = 0.9
"""Attainment: the share of requests that are in time."""

NEAR = 1.03
"""Each value of a grid is so many times the next lower one: what is searched for is known up to this factor."""

FIRST_STRIDE, NEXT_STRIDE = 8, 2
"""Values of a grid from the first to the second that is tried: without an idea of what is held, and with one."""

LEAST_LOAD, LEAST_CV = 0.05, 0.5
"""The lowest ones that are tried; what is not held counts as 0."""


@dataclass(frozen=True)
class Cell:
    """load: offered, as a share of what the devices can do with one request on each all the time. num_offered: devices
    that this is a share of; 0: those of the site.
    """

    site: Site
    arrivals: Arrivals
    load: float
    number: int  # of requests
    num_offered: int = 0

    @property
    def rate(self) -> float:
        """Requests per second."""
        devices = self.num_offered or self.site.num_ranks
        return self.load * devices / self.site.mean_seconds(self.arrivals.shares(len(self.site.workflows)))


WORST = "in time of the worst workflow"
"""Attainment of the workflow that has the lowest, which the mean of all hides."""

BROKEN = "broken promises"
"""Of the requests that have begun, the share that is not in time."""

HELD = "GB held at the end"
"""Of components, on all devices."""


class Measured(NamedTuple):
    """also: further figures of the same run, by name."""

    value: float
    also: Mapping[str, float] = {}


Measure = Callable[[Cell, str, int, float], Measured]
"""(cell, system, seed, what another seed or system gave; 0: unknown) -> what is measured."""


def run(cell: Cell, system: str, seed: int, forecast: Forecast = "learnt", least: float = 0.0) -> Served:
    offered = Offered(cell.arrivals, cell.rate, cell.number, seed)
    return serve(cell.site, system, offered, forecast=forecast, least=least)


def in_time(cell: Cell, system: str, seed: int, near: float) -> Measured:
    """The share of requests that are in time."""
    served = run(cell, system, seed)
    return Measured(served.in_time, {WORST: worst(served)})


def served_load(cell: Cell, system: str, seed: int, near: float) -> Measured:
    """The part of the offered load that is served in time."""
    served = run(cell, system, seed)
    return Measured(served.in_time * cell.load, {WORST: worst(served), BROKEN: served.broken})


def mean_latency(cell: Cell, system: str, seed: int, near: float) -> Measured:
    """In seconds."""
    served = run(cell, system, seed)
    return Measured(fmean(served.latencies), {HELD: served.held_bytes / 1e9})


def worst(served: Served) -> float:
    """See WORST."""
    return min(served.in_time_of.values())


# ------------------------------------------------------------------------------------------------ searches


def most_load(cell: Cell, system: str, seed: int, near: float, forecast: Forecast = "learnt") -> Measured:
    """The highest load that is held; 0: less than LEAST_LOAD."""
    search = _Search(lambda load: replace(cell, load=load), system, seed, forecast)
    return search.edge(near, 0.85, LEAST_LOAD, 2.2)


def most_cv(cell: Cell, system: str, seed: int, near: float) -> Measured:
    """The highest coefficient of variation that is held; 0: less than LEAST_CV. As a lower one, whose arrivals are
    others, is not always held, where a search begins decides: all begin at the same one.
    """
    search = _Search(lambda cv: replace(cell, arrivals=cell.arrivals._replace(cv=cv)), system, seed)
    return search.edge(0.0, 4.0, LEAST_CV, 32.0)


def least_slo_scale(cell: Cell, system: str, seed: int, near: float) -> Measured:
    """The lowest scale of the objectives with which the load is held; 1 / 0.02 = 50: none below. All searches begin at
    the same one: with wider objectives a system admits other requests, and may hold less.
    """
    search = _Search(lambda tightness: replace(cell, site=replace(cell.site, slo_scale=1 / tightness)), system, seed)
    found = search.edge(0.0, 0.5, 0.02, 1.0)
    return found._replace(value=1 / (found.value or 0.02))


def least_devices(cell: Cell, system: str, seed: int, near: float) -> Measured:
    """The fewest devices that hold the load offered to `num_offered`; 64: more than 63."""
    search = _Search(lambda number: replace(cell, site=replace(cell.site, num_ranks=round(number))), system, seed)
    low, high = 0, 1  # high: the first that holds
    while not search.is_held(high):
        low, high = high, 2 * high
        if high > 63:
            return Measured(64.0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if search.is_held(middle) else (middle, high)
    return search.measured(high)


class _Search:
    """Runs of one system and seed in cells that differ in one value."""

    def __init__(self, cell_at: Callable[[float], Cell], system: str, seed: int, forecast: Forecast = "learnt") -> None:
        self._cell_at, self._system, self._seed, self._forecast = cell_at, system, seed, forecast
        self._worst: dict[float, float] = {}  # by the values that are held

    def is_held(self, value: float) -> bool:
        """Whether TARGET is reached."""
        served = run(self._cell_at(value), self._system, self._seed, self._forecast, least=TARGET)
        if served.in_time >= TARGET:
            self._worst[value] = worst(served)
        return value in self._worst

    def measured(self, value: float) -> Measured:
        return Measured(float(value), {WORST: self._worst[value]} if value in self._worst else {})

    def edge(self, near: float, default: float, lowest: float, highest: float) -> Measured:
        """See `edge`. default: where the search starts if `near` is 0, unknown."""
        stride = NEXT_STRIDE if near else FIRST_STRIDE
        return self.measured(edge(self.is_held, near or default, lowest, highest, stride))


def edge(is_held: Callable[[float], bool], start: float, lowest: float, highest: float, stride: int) -> float:
    """The highest value of a grid that is held, where lower ones are held, too; 0: not even the lowest is. start: where
    it may be. stride: values of the grid from there to the second that is tried.
    """

    def is_place_held(place: int) -> bool:
        return is_held(highest / NEAR**place)

    last = floor(log(highest / lowest) / log(NEAR))  # place 0 is the highest value
    high = low = min(max(round(log(highest / start) / log(NEAR)), 0), last)
    if is_place_held(low):
        while (high := max(low - stride, 0)) < low and is_place_held(high):
            low, stride = high, 2 * stride
    else:
        while (low := min(high + stride, last)) > high and not is_place_held(low):
            high, stride = low, 2 * stride
        if low == high:
            return 0.0
    while low - high > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_place_held(middle) else (low, middle)
    return highest / NEAR**low
