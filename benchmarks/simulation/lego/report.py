"""Runs experiments, each task once, and prints what they show. A run that was interrupted goes on from its file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.report import print_line
from benchmarks.simulation.arena.verdict import half_interval
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.lego import bars
from benchmarks.simulation.lego.experiments import (
    EXPERIMENTS,
    NEED_REFERENCES,
    Record,
    Task,
    TaskKey,
    Wanted,
    reference_tasks,
    references,
)
from benchmarks.simulation.lego.measures import LEAST_LOAD
from benchmarks.simulation.lego.numbers import described
from benchmarks.simulation.lego.plots import write_plots
from benchmarks.simulation.lego.systems import BASELINES


def compare(
    names: Sequence[str],
    wanted: Wanted,
    processes: int,
    file: Path | None,
    output: Path | None = None,
    folder: Path | None = None,
) -> list[Record]:
    """Run experiments of EXPERIMENTS and print tables, and the bars. processes: 0: nothing is run, what the file has is
    shown. file: of lines of JSON: what it has is not run again. output: file for the bars as JSON. folder: for plots.
    """
    print("LegoDiffusion's settings, simulated. Assumed, as the paper does not state them:")
    for line in described(wanted.numbers):
        print(line)
    print(f"Steps are made in at most {wanted.numbers.most_rounds} rounds; {wanted.number} requests, the first and")
    print("the last tenth are not counted. Values are on all devices as soon as they are made.")
    found, shown, known = list(_read(file)), dict[TaskKey, Record](), dict[str, float]()
    if any(name in NEED_REFERENCES for name in names):
        tasks = list(reference_tasks(wanted))
        found += _do(tasks, found, processes, file)
        known = references(_of(tasks, found))
    for name in names:
        if name in NEED_REFERENCES and not known:
            continue
        tasks = list(EXPERIMENTS[name](wanted, known))
        found += _do(tasks, found, processes, file)
        mine = _of(tasks, found)
        shown |= {each.task: each for each in mine}
        for line in table(mine):
            print(line, flush=True)
    records = list(shown.values())
    reached = list(bars.bars(records))
    for line in bars.table(reached):
        print(line)
    if output is not None:
        output.write_text(json.dumps([each._asdict() | {"is_met": each.is_met} for each in reached], indent=1))
    if folder is not None:
        write_plots(folder, records)
    return records


def _read(file: Path | None) -> Iterator[Record]:
    if file is not None and file.exists():
        for line in file.read_text().splitlines():
            yield msgspec.json.decode(line, type=Record)


def _of(tasks: Iterable[Task], found: Iterable[Record]) -> list[Record]:
    """The records of these tasks, in their order."""
    known = {each.task: each for each in found}
    return [known[task.key] for task in tasks if task.key in known]


def _do(tasks: Sequence[Task], found: Sequence[Record], processes: int, file: Path | None) -> list[Record]:
    """The records of tasks that have none yet, of one seed after the other: see `_near`."""
    known = {each.task: each for each in found}
    made = list[Record]()
    for seed in sorted({task.seed for task in tasks}) if processes else ():
        left = [(task, _near(task, known)) for task in tasks if task.seed == seed and task.key not in known]
        for record in _done(left, processes):
            made.append(_noted(record, file))
            known[record.task] = record
    return made


def _near(task: Task, known: Mapping[TaskKey, Record]) -> float:
    """Where a search begins: where that of the seed before has ended, else where the best of all systems' has in this
    cell, which spares it runs; 0: unknown.
    """
    if (before := known.get(task.key_of(task.seed - 1))) is not None:
        return before.value
    cell = task.experiment, task.name, task.effort
    choose: Callable[..., float] = max if task.is_more_better else min
    return choose((each.value for each in known.values() if each.place == cell), default=0.0)


def _done(tasks: Sequence[tuple[Task, float]], processes: int) -> Iterator[Record]:
    """What is broken is printed, and has no record."""
    if processes == 1 or len(tasks) < 2:
        yield from _unbroken(map(_do_one, tasks))
        return
    with get_context("forkserver").Pool(min(processes, len(tasks))) as pool:
        yield from _unbroken(pool.imap_unordered(_do_one, tasks))


def _unbroken(every: Iterable[Record | str]) -> Iterator[Record]:
    for each in every:
        if isinstance(each, Record):
            yield each
        else:
            print(each, flush=True)


def _do_one(task: tuple[Task, float]) -> Record | str:
    """What went wrong, if the system left requests or decided what cannot be carried out."""
    try:
        return task[0].do(task[1])
    except AssertionError as error:
        return f"BROKEN {task[0].key}: {error}"


def _noted(record: Record, file: Path | None) -> Record:
    print_line(msgspec.to_builtins(record), file)
    return record


# ---------------------------------------------------------------------------------------------------- tables


def table(records: Sequence[Record]) -> Iterator[str]:
    """A line for each cell and system: the mean over seeds, and our advantage: the mean of the paired ratios, with half
    of its 95 % confidence interval.
    """
    for cell in dict.fromkeys((each.experiment, each.cell) for each in records):
        mine = [each for each in records if (each.experiment, each.cell) == cell]
        seeds = sorted({each.seed for each in mine})
        yield f"\n{mine[0].experiment}: {mine[0].cell}; {len(seeds)} seeds, {mine[0].effort}: {mine[0].unit}"
        for system in dict.fromkeys(each.system for each in mine):
            values = [each.value for each in mine if each.system == system]
            mean, also = f"{fmean(values):7.3f} +- {half_interval(values):5.3f}", _also(mine, system)
            yield f"  {system:<20} {mean}   {_advantage(mine, system):<22} {also}".rstrip()
        for name, others in (("all others", None), ("the paper's baselines", BASELINES)):
            best = _best(mine, others)
            if best is not None:
                yield f"  best of {name}: {best}; {_advantage(mine, best)}"


def _also(records: Sequence[Record], system: str) -> str:
    mine = [each for each in records if each.system == system]
    names = dict.fromkeys(name for each in mine for name in each.also)
    means = {name: fmean(each.also[name] for each in mine if name in each.also) for name in names}
    return ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())


def _best(records: Sequence[Record], among: Sequence[str] | None) -> str | None:
    names = [
        name
        for name in dict.fromkeys(each.system for each in records)
        if name != OURS and (among is None or name in among)
    ]
    choose: Callable[..., str] = max if records[0].is_more_better else min
    return choose(names, key=lambda name: fmean(e.value for e in records if e.system == name)) if names else None


def _advantage(records: Sequence[Record], other: str) -> str:
    """Ours against another system."""
    values = {(each.system, each.seed): each.value for each in records}
    seeds = sorted(seed for system, seed in values if system == other and (OURS, seed) in values)
    if other == OURS or not seeds:
        return ""
    pairs = [(values[OURS, seed], values[other, seed]) for seed in seeds]
    ratios = [_ratio(*pair, is_more_better=records[0].is_more_better) for pair in pairs]
    return f"ours {fmean(ratios):.2f}x +- {half_interval(ratios):.2f}"


def _ratio(ours: float, other: float, *, is_more_better: bool) -> float:
    """Above 1 where ours is better; lower values than the lowest load that is tried count as that."""
    one, two = max(ours, LEAST_LOAD), max(other, LEAST_LOAD)
    return one / two if is_more_better else two / one
