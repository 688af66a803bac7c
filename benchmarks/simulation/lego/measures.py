"""Measures: what is read off a system at a site: attainment, and what it holds, or needs, at 90 %."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt

from benchmarks.simulation.lego.arrivals import Arrivals
from benchmarks.simulation.lego.serving import Forecast, Served, serve
from benchmarks.simulation.lego.site import Site
from benchmarks.simulation.lego.systems import Offered

TARGET = 0.9
"""Attainment: the share of requests that are in time."""

NEAR = 1.03
"""What is searched for is known up to this factor."""


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


def run(cell: Cell, system: str, seed: int, forecast: Forecast = "learnt", least: float = 0.0) -> Served:
    offered = Offered(cell.arrivals, cell.rate, cell.number, seed)
    return serve(cell.site, system, offered, forecast=forecast, least=least)


def holds(cell: Cell, system: str, seed: int, forecast: Forecast = "learnt") -> bool:
    """Whether TARGET is reached."""
    return run(cell, system, seed, forecast, least=TARGET).in_time >= TARGET


def most_load(cell: Cell, system: str, seed: int, forecast: Forecast = "learnt") -> float:
    """The highest load that is held; 0: less than 0.05."""
    return edge(lambda load: holds(replace(cell, load=load), system, seed, forecast), 0.85, 0.05, 2.2)


def most_cv(cell: Cell, system: str, seed: int, forecast: Forecast = "learnt") -> float:
    """The highest coefficient of variation that is held; 0: less than 0.5."""

    def is_held(cv: float) -> bool:
        return holds(replace(cell, arrivals=cell.arrivals._replace(cv=cv)), system, seed, forecast)

    return edge(is_held, 4.0, 0.5, 32.0)


def least_slo_scale(cell: Cell, system: str, seed: int, forecast: Forecast = "learnt") -> float:
    """The lowest scale of the objectives with which the load is held; 1 / 0.02 = 50: none below."""

    def is_held(tightness: float) -> bool:
        return holds(replace(cell, site=replace(cell.site, slo_scale=1 / tightness)), system, seed, forecast)

    return 1 / (edge(is_held, 0.5, 0.02, 1.0) or 0.02)


def least_devices(cell: Cell, system: str, seed: int, forecast: Forecast = "learnt") -> int:
    """The fewest devices that hold the load offered to `num_offered`; 64: more than 63."""

    def is_held(number: int) -> bool:
        return holds(replace(cell, site=replace(cell.site, num_ranks=number)), system, seed, forecast)

    low, high = 0, 1  # high: the first that holds
    while not is_held(high):
        low, high = high, 2 * high
        if high > 63:
            return 64
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_held(middle) else (middle, high)
    return high


def edge(is_held: Callable[[float], bool], start: float, lowest: float, highest: float) -> float:
    """The highest value that is held, where lower ones are held, too, up to NEAR; 0: not even the lowest is."""
    value, factor = start, 1.25
    if is_held(value):
        low = value
        while (high := min(low * factor, highest)) < highest and is_held(high):
            low, factor = high, factor * factor
        if high == highest and is_held(highest):
            return highest
    else:
        high = value
        while (low := max(high / factor, lowest)) > lowest and not is_held(low):
            high, factor = low, factor * factor
        if low == lowest and not is_held(lowest):
            return 0.0
    while high / low > NEAR:
        middle = sqrt(low * high)
        low, high = (middle, high) if is_held(middle) else (low, middle)
    return low
