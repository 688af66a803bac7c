"""Latency and device time of videos by policy, in simulated time: what DDiT's evaluation (section 6) compares.

Every cell is printed, with the numbers that are assumed because the paper shows them in figures only; all cells and
policies share one set of parameters. `conclusions` says what the cells show, and `vary` which of that changes if an
assumed number is halved or doubled.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from statistics import mean
from typing import NamedTuple

from benchmarks.simulation.compared import OURS
from benchmarks.simulation.least_mean import least_mean
from benchmarks.simulation.optimum import batch_model, optimum
from benchmarks.simulation.video_engine import POLICIES, serve
from benchmarks.simulation.video_load import TOKENS, Arrival, Assumed, VideoLoad, assumed

STATIC = ("SDoP 1", "SDoP 2", "SDoP 4")

MACHINE = 8
"""Devices of one machine."""

MORE_MIXES = ((0.8, 0.1, 0.1), (0.1, 0.1, 0.8))
"""Beside those of the load: nearly all small, nearly all large."""

VARIED_RATES = (0.0, 0.5, 1.0)
"""Where numbers are varied, there are these cells and the mixes of the load alone, and policies that no conclusion
needs are left out. With fewer requests or longer steps conclusions are others.
"""

VARIED_SEEDS = 3
"""There, of requests that come one by one: with other arrivals the ratio of two policies' p99 differs by up to 0.15."""


class Cell(NamedTuple):
    """Arrivals on some devices. rate: requests per second; 0: all come at once."""

    devices: int
    rate: float
    number: int  # of requests

    @property
    def name(self) -> str:
        return f"{self.devices} devices, {f'{self.rate:g} a second' if self.rate else 'burst'}"


CELLS = (*(Cell(8, rate, 300) for rate in (0.25, 0.5, 0.75, 1.0)), Cell(8, 0.0, 60), Cell(64, 0.0, 400))
"""As in sections 6.2 and 6.3."""


class Figures(NamedTuple):
    """Of one policy in one cell and mix, the mean over seeds."""

    mean: float  # latency in seconds
    p99: float
    device_seconds: float


@dataclass(frozen=True)
class Result:
    """One cell with one mix."""

    cell: Cell
    mix: tuple[float, ...]
    figures: Mapping[str, Figures]  # by policy
    optimum: float  # least device-seconds, where all that comes is known before
    least_mean: float  # latency that no policy is below, of a burst; 0 for other cells

    def ratio(self, policy: str, others: Iterable[str], value: Callable[[Figures], float]) -> float:
        """The best of other policies, as a multiple of this one."""
        return min(value(self.figures[each]) for each in others) / value(self.figures[policy])


Run = tuple[VideoLoad, Cell, tuple[float, ...], int, str]
"""(load, cell, mix, seed, policy)"""


def run(
    load: VideoLoad,
    cells: Sequence[Cell],
    mixes: Sequence[tuple[float, ...]],
    policies: Sequence[str],
    num_seeds: int,
    processes: int,
) -> Iterator[Result]:
    """All cells with all mixes, as they are done. processes: that run them; 1: this one."""
    pairs = list(product(cells, mixes))
    runs: list[Run] = [
        (load, cell, mix, seed, policy) for cell, mix in pairs for policy in policies for seed in range(num_seeds)
    ]
    if processes == 1:
        yield from _results(load, pairs, policies, num_seeds, map(_run, runs))
        return
    with get_context("forkserver").Pool(processes) as pool:
        yield from _results(load, pairs, policies, num_seeds, pool.imap(_run, runs))


def _results(
    load: VideoLoad,
    pairs: Iterable[tuple[Cell, tuple[float, ...]]],
    policies: Sequence[str],
    num_seeds: int,
    found: Iterator[Figures],
) -> Iterator[Result]:
    for cell, mix in pairs:
        figures = {policy: _mean([next(found) for _ in range(num_seeds)]) for policy in policies}
        every = [_arrivals(load, cell, mix, seed) for seed in range(num_seeds)]
        least = mean(_optimum(load, cell, arrivals) for arrivals in every)
        yield Result(cell, mix, figures, least, mean(_least_mean(load, cell, arrivals) for arrivals in every))


def _run(run: Run) -> Figures:
    load, cell, mix, seed, policy = run
    served = serve(load, mix, _arrivals(load, cell, mix, seed), policy, cell.devices)
    latencies = sorted(served.latencies)
    return Figures(mean(latencies), latencies[int(0.99 * len(latencies))], served.device_seconds)


def _arrivals(load: VideoLoad, cell: Cell, mix: Sequence[float], seed: int) -> list[Arrival]:
    return load.arrivals(mix, cell.number, cell.rate, seed)


def _mean(figures: Sequence[Figures]) -> Figures:
    return Figures(*(mean(each) for each in zip(*figures, strict=True)))


def _optimum(load: VideoLoad, cell: Cell, arrivals: Sequence[Arrival]) -> float:
    """Of the batch model: also where requests come one by one, for which it is a lower bound."""
    numbers = Counter(arrival.name for arrival in arrivals)
    names = [name for name in TOKENS if numbers[name]]
    seconds = [{degree: load.request_seconds(name, degree) for degree in load.speed[name]} for name in names]
    machines = [MACHINE] * (cell.devices // MACHINE)
    return optimum(machines, seconds, batch_model([numbers[name] for name in names])).occupied


def _least_mean(load: VideoLoad, cell: Cell, arrivals: Sequence[Arrival]) -> float:
    return 0.0 if cell.rate else least_mean(load, cell.devices, (arrival.name for arrival in arrivals))


# ------------------------------------------------------------------------------------------------------ conclusions


class Conclusion(NamedTuple):
    """What the cells show."""

    name: str
    value: float
    bar: float | None = None  # that the value should reach; None: there is none
    is_most: bool = False  # the value should not be above the bar

    @property
    def is_met(self) -> bool:
        if self.bar is None:
            return True
        return self.value <= self.bar if self.is_most else self.value >= self.bar

    @property
    def text(self) -> str:
        sign = "<=" if self.is_most else ">="
        bar = "" if self.bar is None else f" ({sign} {self.bar:g}: {'met' if self.is_met else 'NOT met'})"
        return f"{self.name}: {self.value:.3f}{bar}"


def _of_mean(figures: Figures) -> float:
    return figures.mean


def _of_p99(figures: Figures) -> float:
    return figures.p99


PAPER_P99 = {0.25: 0.1288, 0.5: 0.1071, 0.75: 0.1923, 1.0: 0.1923}
"""Rate -> "up to": share by which DDiT's p99 is below that of the best static degree (section 6.2)."""


def conclusions(results: Sequence[Result]) -> Iterator[Conclusion]:
    """Ratios are of another policy's figure to ours: above 1 ours is faster."""
    mixes = {result.mix for result in results} - set(MORE_MIXES)
    burst = [each for each in results if each.cell.devices == 64 and each.mix in mixes]
    if burst:
        yield Conclusion("64 devices, burst: p99 of SDoP 4, mean over mixes", _ratios(burst, ("SDoP 4",), _of_p99), 1.6)
        yield Conclusion("... and its mean", _ratios(burst, ("SDoP 4",), _of_mean), 1.6)
    for name, value in (("p99", _of_p99), ("mean", _of_mean)):
        worst = min(results, key=lambda each: each.ratio(OURS, STATIC, value))
        yield Conclusion(
            f"least {name} of the best static degree of any cell ({worst.cell.name}, {worst.mix})",
            worst.ratio(OURS, STATIC, value),
            1 / 1.03,
        )
    for rate in sorted({each.cell.rate for each in results} - {0.0}):
        of_rate = [each for each in results if each.cell.rate == rate]
        best = max(each.ratio(OURS, STATIC, _of_p99) for each in of_rate)
        yield Conclusion(f"rate {rate:g}, best mix: p99 of the best static degree", best, 1 / (1 - PAPER_P99[rate]))
    for devices in sorted({each.cell.devices for each in results if not each.cell.rate}):
        bursts = [each for each in results if not each.cell.rate and each.cell.devices == devices]
        for name, of in (("", mixes), ("mixes beside these, ", set(MORE_MIXES))):
            some = [each for each in bursts if each.mix in of]
            yield from _of_worst(f"{devices} devices, burst, {name}worst mix", some)
        least = min(each.ratio(OURS, STATIC, _of_p99) for each in bursts)
        yield Conclusion(f"{devices} devices, burst: least p99 of the best static degree", least, 1 / 1.05)
        most = max(each.figures[OURS].device_seconds / each.optimum for each in bursts)
        yield Conclusion("... our device-seconds against the optimum, most", most, 1.39, is_most=True)
    yield from _ablations(results)


def _of_worst(name: str, bursts: Sequence[Result]) -> Iterator[Conclusion]:
    if not bursts:
        return
    worst = min(bursts, key=lambda each: each.ratio(OURS, STATIC, _of_mean))
    least = worst.ratio(OURS, STATIC, _of_mean)
    yield Conclusion(f"{name} {worst.mix}: mean of the best static degree", least, 1.2)
    bound = min(worst.figures[each].mean for each in STATIC) / worst.least_mean
    yield Conclusion("... and no policy could have more than", bound)


def _ratios(results: Sequence[Result], others: Sequence[str], value: Callable[[Figures], float]) -> float:
    return mean(each.ratio(OURS, others, value) for each in results)


def _ablations(results: Sequence[Result]) -> Iterator[Conclusion]:
    """Beside what the paper has: up to -20 % at rate 0.5, -26.1 % in a burst; -35.2 %."""
    for name, rate in (("rate 0.5", 0.5), ("burst", 0.0)):
        of_rate = [each for each in results if each.cell.rate == rate and each.cell.devices == 8]
        if of_rate:
            least = min(each.ratio("SDoP 2", ["SDoP 2 decoupled"], _of_p99) for each in of_rate)
            yield Conclusion(f"decoupling alone, degree 2, {name}, best mix: change of p99", least - 1)
    least = min(each.ratio("ddit, no promotion", ["ddit"], _of_p99) for each in results)
    yield Conclusion("promotion alone, policy ddit, best cell: change of p99", least - 1)


NEEDED = (*STATIC, "SDoP 2 decoupled", "ddit", "ddit, no promotion", OURS)
"""Policies that conclusions need."""


def vary(load: VideoLoad, processes: int, cells: Sequence[Cell] = CELLS) -> Iterator[str]:
    """Which conclusions change with each assumed number."""
    cells = [cell for cell in cells if cell.rate in VARIED_RATES]

    def found(load: VideoLoad) -> list[Conclusion]:
        streams, bursts = ([cell for cell in cells if bool(cell.rate) is comes] for comes in (True, False))
        of_streams = run(load, streams, load.mixes, NEEDED, VARIED_SEEDS, processes)
        return list(conclusions([*of_streams, *run(load, bursts, load.mixes, NEEDED, 1, processes)]))

    first = found(load)
    yield from ("as assumed:", *(f"  {each.text}" for each in first))
    for number in assumed(load):
        for name, varied in (("half", number.half), ("twice", number.twice)):
            yield f"{name} of the {number.name}:"
            yield from _changes(first, found(varied))


def _changes(before: Sequence[Conclusion], after: Sequence[Conclusion]) -> Iterator[str]:
    for one, other in zip(before, after, strict=True):
        if one.is_met != other.is_met:
            yield f"  now {'met' if other.is_met else 'NOT met'}: {other.text} instead of {one.value:.3f}"
    for one, other in zip(before, after, strict=True):
        if one.bar is None:
            yield f"  {other.name}: {other.value:+.3f} instead of {one.value:+.3f}"


# ------------------------------------------------------------------------------------------------------ report


def compare(num_seeds: int, processes: int) -> list[Result]:
    """Run all cells and print them."""
    load, results, cell = VideoLoad.read(), list[Result](), None
    for line in describe(load):
        print(line)
    for result in run(load, CELLS, [*load.mixes, *MORE_MIXES], list(POLICIES), num_seeds, processes):
        results.append(result)
        if result.cell != cell:
            cell = result.cell
            print(f"\n{cell.name}, {cell.number} requests, {num_seeds} seeds")
            print(_row("shares of 144p, 240p, 360p", [*POLICIES, "least"]))
        for line in _rows(result):
            print(line, flush=True)
    print()
    for conclusion in conclusions(results):
        print(conclusion.text)
    return results


def describe(load: VideoLoad) -> Iterator[str]:
    """The numbers, and which of them are assumed."""
    yield "Videos of DDiT (51 frames, 30 steps). Stated in the paper: degrees up to 1, 2, 4 are useful; with"
    yield "more devices 144p is slower, 240p hardly faster, decoding never. Derived: 360p is 3.54x as fast on four."
    yield "Assumed, as the paper shows them in figures only:"
    yield f"  mixes {load.mixes}, and {MORE_MIXES}"
    for number in assumed(load):
        yield f"  {number.name}: {_value(load, number):g}"


def _value(load: VideoLoad, number: Assumed) -> float:
    """The number itself."""
    what, _, name = number.name.rpartition(" of ")
    if what == "service seconds":
        return load.service_seconds[name]
    if what == "decode share":
        return load.decode_share[name]
    name, _, degree = name.partition(" at degree ")
    return load.speed[name][int(degree)] - load.speed[name][int(degree) // 2]


def _rows(result: Result) -> Iterator[str]:
    mix = " ".join(f"{share:g}" for share in result.mix)
    for index, what in enumerate(Figures._fields):
        values = [f"{each[index]:.1f}" for each in result.figures.values()]
        least = {"device_seconds": result.optimum, "mean": result.least_mean}.get(what, 0.0)
        yield _row(f"{mix}  {what}", [*values, f"{least:.1f}" if least else ""])


def _row(name: str, values: Sequence[str]) -> str:
    widths = (max(8, len(column) + 2) for column in (*POLICIES, "least"))
    return f"{name:<32}" + "".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=False))


def as_json(results: Sequence[Result]) -> str:
    """The figures by cell, mix and policy."""
    cells = [
        {
            "cell": result.cell.name,
            "mix": result.mix,
            "optimum_device_seconds": result.optimum,
            "policies": {name: figures._asdict() for name, figures in result.figures.items()},
        }
        for result in results
    ]
    return json.dumps({"cells": cells}, indent=1)
