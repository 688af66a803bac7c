"""The bars of this evaluation: what ours should reach beside the other systems, and what it has reached.

Ratios are means over seeds of ratios in the same cell and seed, with half of their 95 % confidence interval. A baseline
is one of BASELINES. The pooled monolith is in no paper: where baselines alone count, it stands beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.simulation.arena.bar import Bar
from benchmarks.simulation.arena.verdict import half_interval
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.lego.experiments import Record
from benchmarks.simulation.lego.measures import BROKEN, HELD, LEAST_CV, LEAST_LOAD, WORST
from benchmarks.simulation.lego.production import COLD
from benchmarks.simulation.lego.systems import ABLATIONS, BASELINES, FIXED

FLOORS = {"cv": LEAST_CV}
"""Experiment -> what a value counts as at least, because lower ones are not tried; LEAST_LOAD elsewhere."""


Found = list[float]
"""By seed."""


@dataclass(frozen=True)
class CellRecords:
    """The records of one cell."""

    experiment: str
    cell: str
    records: Sequence[Record]

    @property
    def systems(self) -> list[str]:
        """Those that are compared with ours."""
        return [name for name in dict.fromkeys(each.system for each in self.records) if name != OURS]

    def mean(self, system: str) -> float:
        return fmean(self._values(system).values())

    def best(self, among: Iterable[str] | None = None) -> str | None:
        """The best of these systems; None: all others."""
        names = [name for name in self.systems if among is None or name in among]
        sign = 1 if self.records[0].is_more_better else -1
        return max(names, key=lambda name: sign * self.mean(name), default=None)

    def ratio(self, other: str, also: str = "") -> Found:
        """Ours as a multiple of another system's. also: name of a further figure."""
        if also:
            return [ours / theirs for ours, theirs in self._pairs(other, also) if theirs]
        floor = FLOORS.get(self.experiment, LEAST_LOAD)
        return [max(ours, floor) / max(theirs, floor) for ours, theirs in self._pairs(other)]

    def more(self, other: str) -> Found:
        """Ours without another system's."""
        return [ours - theirs for ours, theirs in self._pairs(other)]

    def own(self, also: str = "") -> Found:
        return list(self._values(OURS, also).values())

    def _pairs(self, other: str, also: str = "") -> list[tuple[float, float]]:
        ours, others = self._values(OURS, also), self._values(other, also)
        return [(ours[seed], others[seed]) for seed in sorted(ours.keys() & others.keys())]

    def _values(self, system: str, also: str = "") -> dict[int, float]:
        mine = (each for each in self.records if each.system == system)
        return {each.seed: each.also[also] if also else each.value for each in mine if not also or also in each.also}

    def bar(
        self,
        what: str,
        found: Found,
        *,
        least: float | None = None,
        most: float | None = None,
    ) -> Iterator[Bar]:
        if found:
            seeds = "1 seed" if len(found) == 1 else f"{len(found)} seeds"
            name = f"{self.experiment}: {self.cell}; {what}; {seeds}"
            yield Bar(name, fmean(found), least, most, half_interval(found) if len(found) > 1 else None)

    def against(
        self,
        other: str | None,
        *,
        also: str = "",
        least: float | None = None,
        most: float | None = None,
    ) -> Iterator[Bar]:
        """Ours as a multiple of another system's."""
        if other is not None:
            yield from self.bar(f"{also or 'ours'} / {other}", self.ratio(other, also), least=least, most=most)


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """Of all cells in which ours has a record."""
    for experiment, cell in dict.fromkeys((each.experiment, each.cell) for each in records):
        mine = [each for each in records if (each.experiment, each.cell) == (experiment, cell)]
        if experiment in _BARS and any(each.system == OURS for each in mine):
            yield from _BARS[experiment](CellRecords(experiment, cell, mine))


def table(every: Sequence[Bar]) -> Iterator[str]:
    """A line for each bar, and how many are met."""
    judged = [each for each in every if each.least is not None or each.most is not None]
    yield f"\n{sum(each.is_met for each in judged)} of {len(judged)} bars are met (ours: {OURS})"
    for each in every:
        yield f"  {each.text}"


def _rate(one: CellRecords) -> Iterator[Bar]:
    best = one.best()
    yield from one.against(best, least=0.97)
    if best is not None and len(found := one.ratio(best)) > 1:
        yield from one.bar(
            f"upper end of the interval of ours / {best}", [fmean(found) + half_interval(found)], least=1.0
        )
    is_hard = "8 devices" in one.cell and one.cell.startswith(("S5", "S6"))
    yield from one.against("lego", least=1.1 if is_hard else None)


def _bursts(one: CellRecords) -> Iterator[Bar]:
    is_paper = one.cell.startswith("S6, 16 devices")
    yield from one.against(one.best(BASELINES), least=3.0 if is_paper else None)
    yield from one.against("lego", least=1.6 if is_paper else None)
    yield from one.against("pooled")


def _loads(one: CellRecords) -> Iterator[Bar]:
    yield from one.against(one.best(BASELINES), least=1.5)
    yield from one.against("lego")
    yield from one.against("pooled")


def _slo(one: CellRecords) -> Iterator[Bar]:
    yield from one.bar("ours", one.own(), most=1.4)
    yield from one.against(one.best(BASELINES), most=None if "Poisson" in one.cell else 1 / 2.2)
    yield from one.against("lego")
    yield from one.against("pooled")


def _cv(one: CellRecords) -> Iterator[Bar]:
    yield from one.against(one.best(BASELINES), least=1.6 if "by workflow" in one.cell else 1.15)
    yield from one.against("pooled")


def _devices(one: CellRecords) -> Iterator[Bar]:
    if "Poisson" in one.cell:
        best = one.best()
        if best is not None:
            yield from one.bar(f"ours - {best}", one.more(best), most=-1.0)
        return
    yield from one.against("Diffusers-S", most=1 / 2)
    yield from one.against("Diffusers", most=1 / 3)
    yield from one.against("pooled")


def _strict(one: CellRecords) -> Iterator[Bar]:
    best = one.best([*BASELINES, "pooled"])
    if best is not None:
        yield from one.bar(f"ours - {best}", one.more(best), least=0.0)
    yield from one.against("lego")


def _overload(one: CellRecords) -> Iterator[Bar]:
    yield from one.bar("in time, of what the devices can do", one.own(), least=0.85)
    for name in (BROKEN, WORST):
        yield from one.bar(name, one.own(name))


def _memory(one: CellRecords) -> Iterator[Bar]:
    yield from one.against("lego", least=2.5)
    yield from one.against("Diffusers-S", least=0.85)


def _degrees(one: CellRecords) -> Iterator[Bar]:
    load = float(one.cell.rpartition("load ")[2])
    yield from one.against(one.best(FIXED), most=1.06)
    yield from one.against("degree 1", most=1 / 1.3 if load <= 0.5 else None)
    yield from one.against("degree 2", most=1 / 1.2 if load >= 0.75 else None)
    yield from one.against("lego")


def _sharing(one: CellRecords) -> Iterator[Bar]:
    """A workflow that is on one device alone has no other to take turns with: memory is compared where both are on
    both.
    """
    yield from one.against("Diffusers", most=0.65)
    yield from one.against("pooled")
    yield from one.against("Diffusers-C", also=HELD, most=0.55)
    yield from one.against("Diffusers", also=HELD)


def _production(one: CellRecords) -> Iterator[Bar]:
    yield from one.against("Diffusers-C", also=COLD, most=0.5)
    yield from one.against("Diffusers-C", most=0.65)
    yield from one.against("lego", also=COLD)
    yield from one.against("lego")


def _ablations(one: CellRecords) -> Iterator[Bar]:
    for name in ABLATIONS:
        yield from one.against(name)


def _best(one: CellRecords) -> Iterator[Bar]:
    yield from one.against(one.best())


_BARS: Mapping[str, Callable[[CellRecords], Iterator[Bar]]] = {
    "rate": _rate,
    "bursts": _bursts,
    "loads": _loads,
    "slo": _slo,
    "cv": _cv,
    "devices": _devices,
    "strict": _strict,
    "overload": _overload,
    "memory": _memory,
    "degrees": _degrees,
    "sharing": _sharing,
    "production": _production,
    "ablations": _ablations,
    "true": _best,
    "numbers": _best,
    "trace": _best,
    "pooled": _best,
}
"""By experiment."""
