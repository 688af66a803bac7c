"""The experiments of LegoDiffusion's evaluation (section 7), each a set of tasks that are independent of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf
from statistics import fmean
from typing import NamedTuple

import msgspec

from benchmarks.simulation.compared import OURS
from benchmarks.simulation.lego.arrivals import Arrivals
from benchmarks.simulation.lego.measures import (
    Cell,
    Measure,
    Measured,
    in_time,
    least_devices,
    least_slo_scale,
    mean_latency,
    most_cv,
    most_load,
    served_load,
)
from benchmarks.simulation.lego.numbers import ASSUMED, Numbers, varied
from benchmarks.simulation.lego.production import DATA as PRODUCTION
from benchmarks.simulation.lego.production import PACE, ROUNDS, TRACED_SYSTEMS, Fleet, p95_wait
from benchmarks.simulation.lego.site import Site
from benchmarks.simulation.lego.systems import ABLATIONS, FIXED
from benchmarks.simulation.lego.version import version_of

POISSON = Arrivals()
BURSTY = Arrivals("by workflow", 4.0)
POOLED_BURSTS = Arrivals("pooled", 4.0)
TRACE = Arrivals("trace")
HALF_GIGABYTES = 37.0
SETTING = "S6"
"""Where the paper varies one thing at a time; on 16 devices."""


TaskKey = tuple[str, str, str, int, str, str]
"""(experiment, cell, system, seed, effort, version)"""


class Record(msgspec.Struct, frozen=True):
    """What one system did in one cell with one seed."""

    experiment: str
    cell: str  # in words, with the arrivals
    unit: str  # of the value, in words
    system: str
    seed: int
    value: float
    effort: str  # how much was simulated, in words
    is_more_better: bool = True
    also: dict[str, float] = {}  # see `Measured`
    version: str = ""  # of the system, see `version_of`

    @property
    def task(self) -> TaskKey:
        return self.experiment, self.cell, self.system, self.seed, self.effort, self.version

    @property
    def place(self) -> tuple[str, str, str]:
        """(experiment, cell, effort), which the systems that are compared have in common."""
        return self.experiment, self.cell, self.effort


@dataclass(frozen=True)
class Task:
    """What gives a record. measure: (system, seed, near) as for Measure. effort: how much is simulated, in words.
    version: of the system.
    """

    experiment: str
    name: str
    unit: str
    system: str
    seed: int
    measure: Callable[[str, int, float], Measured]
    effort: str
    is_more_better: bool
    version: str

    @property
    def key(self) -> TaskKey:
        return self.key_of(self.seed)

    def key_of(self, seed: int) -> TaskKey:
        """The key of the same task with another seed."""
        return self.experiment, self.name, self.system, seed, self.effort, self.version

    def do(self, near: float) -> Record:
        """near: the value of another seed, or of another system; 0: unknown."""
        found = self.measure(self.system, self.seed, near)
        facts = self.experiment, self.name, self.unit, self.system, self.seed
        return Record(*facts, found.value, self.effort, self.is_more_better, dict(found.also), self.version)


class Wanted(NamedTuple):
    """What is to be run. number: of requests of a run."""

    numbers: Numbers
    settings: Sequence[str]
    devices: Sequence[int]
    seeds: int
    number: int
    systems: Sequence[str]

    @property
    def num_devices(self) -> int:
        """Where one thing is varied at a time: the paper's, if it is among those wanted."""
        return 16 if 16 in self.devices else self.devices[0]


Experiment = Callable[[Wanted, Mapping[str, float]], Iterator[Task]]
"""(what is wanted, reference loads) -> its tasks. A reference load is the highest that `lego` holds with some arrivals
(the paper's rate scale 1), by `Arrivals.text`."""


def _tasks(
    wanted: Wanted,
    experiment: str,
    name: str,
    unit: str,
    cell: Cell,
    measure: Measure,
    *,
    systems: Sequence[str] = (),
    is_more_better: bool = True,
) -> Iterator[Task]:
    effort = f"{cell.number} requests, {cell.site.numbers.most_rounds} rounds"
    for seed in range(wanted.seeds):
        for system in systems or wanted.systems:
            bound, version = partial(measure, cell), version_of(system)
            yield Task(experiment, name, unit, system, seed, bound, effort, is_more_better, version)


def _cell(wanted: Wanted, arrivals: Arrivals, load: float, setting: str = SETTING, devices: int = 0) -> Cell:
    """devices: 0: those of where one thing is varied at a time."""
    return Cell(Site(wanted.numbers, setting, devices or wanted.num_devices), arrivals, load, wanted.number)


def _name(cell: Cell, *more: str) -> str:
    return ", ".join([cell.site.setting, f"{cell.site.num_ranks} devices", cell.arrivals.text, *more])


def _rate(wanted: Wanted, arrivals: Arrivals, experiment: str) -> Iterator[Task]:
    for devices in wanted.devices:
        for setting in wanted.settings:
            cell = _cell(wanted, arrivals, 0.0, setting, devices)
            yield from _tasks(wanted, experiment, _name(cell), "load held at 90 %", cell, most_load)


def _with(wanted: Wanted, experiment: str, arrivals: Arrivals, what: str, numbers: Numbers) -> Iterator[Task]:
    """The load held with other numbers. what: is other, in words."""
    changed = wanted._replace(numbers=numbers)
    cell = _cell(changed, arrivals, 0.0)
    yield from _tasks(changed, experiment, _name(cell, what), "load held at 90 %", cell, most_load)


def rate(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    """Figure 9 a to f."""
    yield from _rate(wanted, POISSON, "rate")


def bursts(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    """The rate held when each workflow has bursts of its own, where the paper's factor of 3 appears."""
    yield from _rate(wanted, BURSTY, "bursts")


def pooled(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    """The rate held when all workflows have their bursts together."""
    yield from _rate(wanted, POOLED_BURSTS, "pooled")


def trace(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    yield from _rate(wanted, TRACE, "trace")


def loads(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    """Bursts with loads that take half as long."""
    faster = varied(wanted.numbers, "load_gigabytes_per_second", 2.0)
    yield from _with(wanted, "loads", BURSTY, "loads halved", faster)


def memory(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    """Devices that hold one base model of FLUX: the largest workflow just fits, which it does not in 36 GB."""
    small = msgspec.structs.replace(wanted.numbers, device_gigabytes=HALF_GIGABYTES)
    yield from _with(wanted, "memory", POISSON, f"memory {HALF_GIGABYTES:g} GB", small)


def numbers(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    """Each assumed number halved and doubled."""
    for name, arrivals in product(ASSUMED, (POISSON, BURSTY)):
        for what, factor in (("halved", 0.5), ("doubled", 2.0)):
            title = f"{name.replace('_', ' ')} {what}"
            yield from _with(wanted, "numbers", arrivals, title, varied(wanted.numbers, name, factor))


def true(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    """Durations that do not vary and are known, beside those of `rate`, whose forecast is learnt."""
    cell = _cell(wanted, POISSON, 0.0)
    yield from _tasks(wanted, "rate", _name(cell), "load held at 90 %", cell, most_load)
    measure = partial(most_load, forecast="true")
    yield from _tasks(wanted, "true", _name(cell, "true seconds known"), "load held at 90 %", cell, measure)


def strict(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    """Figure 9 g at its left end: only two devices for a request are fast enough."""
    for setting in wanted.settings:
        cell = Cell(Site(wanted.numbers, setting, wanted.num_devices, 1.0), POISSON, 0.4, wanted.number)
        name = _name(cell, "objective 1.0 x alone, load 0.4")
        yield from _tasks(wanted, "strict", name, "in time", cell, in_time)


def slo(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    """Figure 9 g."""
    for arrivals in (POISSON, TRACE, BURSTY):
        cell = _cell(wanted, arrivals, references[arrivals.text])
        name, unit = _name(cell, f"load {cell.load:.2f}"), "scale of objectives needed for 90 %"
        yield from _tasks(wanted, "slo", name, unit, cell, least_slo_scale, is_more_better=False)


def cv(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    """Figure 9 h."""
    for arrivals in (BURSTY, POOLED_BURSTS):
        cell = _cell(wanted, arrivals, 0.25 * references[POISSON.text])
        name = f"{SETTING}, {wanted.num_devices} devices, Gamma {arrivals.kind}, load {cell.load:.2f}"
        yield from _tasks(wanted, "cv", name, "CV held at 90 %", cell, most_cv)


def devices(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    """Figure 9 i."""
    for arrivals in (POISSON, BURSTY):
        load = 0.5 * references[arrivals.text]
        cell = replace(_cell(wanted, arrivals, load), num_offered=wanted.num_devices)
        name = f"{SETTING}, {arrivals.text}, load {load:.2f} of {wanted.num_devices} devices"
        yield from _tasks(wanted, "devices", name, "devices needed for 90 %", cell, least_devices, is_more_better=False)


def overload(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    """Figure 10, right: more than the devices can do, and what of that admission has promised in vain."""
    for setting in wanted.settings:
        for load in (1.5, 2.0):
            cell = _cell(wanted, POISSON, load, setting)
            yield from _tasks(wanted, "overload", _name(cell, f"load {load:g}"), "in time x load", cell, served_load)


def degrees(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    """Figure 4, right: SD3's workflows on four devices, without objectives."""
    for load in (0.1, 0.3, 0.5, 0.75, 0.9):
        cell = Cell(Site(wanted.numbers, "S1", 4, inf), POISSON, load, wanted.number)
        yield from _latency(wanted, "degrees", _name(cell, f"load {load:g}"), cell, (*FIXED, "lego", OURS))


def sharing(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    """Figure 4, left: SD3 with and without a ControlNet on two devices, a device for each or both shared: latency
    without objectives, and memory. Diffusers-C has both workflows on both devices.
    """
    for load in (0.4, 0.6):
        cell = Cell(Site(wanted.numbers, "S1", 2, inf, most_nets=1), POISSON, load, wanted.number)
        systems = "Diffusers", "Diffusers-C", "pooled", "lego", OURS
        yield from _latency(wanted, "sharing", f"a pair of {_name(cell, f'load {load:g}')}", cell, systems)


def _latency(wanted: Wanted, experiment: str, name: str, cell: Cell, systems: Sequence[str]) -> Iterator[Task]:
    return _tasks(wanted, experiment, name, "mean latency", cell, mean_latency, systems=systems, is_more_better=False)


def ablations(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    """Ours without one of its parts."""
    small = msgspec.structs.replace(wanted.numbers, device_gigabytes=HALF_GIGABYTES)
    for arrivals, numbers in product((POISSON, BURSTY), (wanted.numbers, small)):
        cell = Cell(Site(numbers, SETTING, wanted.num_devices), arrivals, 0.0, wanted.number)
        name = _name(cell, f"memory {numbers.device_gigabytes:g} GB")
        yield from _tasks(wanted, "ablations", name, "load held at 90 %", cell, most_load, systems=(OURS, *ABLATIONS))


def production(wanted: Wanted, references: Mapping[str, float]) -> Iterator[Task]:
    """A production trace, of which each seed has another part."""
    effort = f"a part of the trace, {ROUNDS} rounds"
    for gigabytes in (72.0, 36.0):
        fleet = Fleet(gigabytes)
        name = f"GenTD26's requests, times {PACE:g}, {fleet.num_ranks} devices, memory {gigabytes:g} GB"
        for seed, system in product(range(wanted.seeds), TRACED_SYSTEMS):
            measure, version = partial(p95_wait, fleet, wanted.numbers), version_of(system, PRODUCTION)
            yield Task("production", name, "P95 wait", system, seed, measure, effort, False, version)


EXPERIMENTS: Mapping[str, Experiment] = {
    each.__name__: each
    for each in (
        *(rate, bursts, loads, slo, cv, devices, strict, overload, memory, degrees, sharing, production),
        *(true, ablations, trace, pooled, numbers),
    )
}
"""By name, those first that bars are about."""

NEED_REFERENCES = ("slo", "cv", "devices")

REFERENCE_SEEDS = 2
"""However many are wanted, so that cells have the same load where more are."""


def reference_tasks(wanted: Wanted) -> Iterator[Task]:
    """What reference loads are made of."""
    few = wanted._replace(seeds=REFERENCE_SEEDS)
    for arrivals in (POISSON, TRACE, BURSTY):
        cell = _cell(few, arrivals, 0.0)
        yield from _tasks(few, "reference", _name(cell), "load held at 90 %", cell, most_load, systems=("lego",))


def references(records: Sequence[Record]) -> dict[str, float]:
    """From the records of these tasks."""
    found: dict[str, list[float]] = {}
    for each in records:
        if each.experiment == "reference":
            found.setdefault(each.cell, []).append(each.value)
    return {
        arrivals.text: fmean(values)
        for arrivals in (POISSON, TRACE, BURSTY)
        for cell, values in found.items()
        if arrivals.text in cell
    }
