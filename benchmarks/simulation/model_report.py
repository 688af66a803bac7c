"""What loads cost the requests of scenarios with several models, by scheduling policy and by memory of the ranks.

Each run is a line of JSON; a table follows, of means over seeds. The loads of an offline optimum are beside it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np

from benchmarks.report import percentile, print_line
from benchmarks.simulation.model_engine import Served, serve
from benchmarks.simulation.model_scenario import MODEL_SCENARIOS, ModelScenario
from core.config import RouterPolicy


class ModelRun(msgspec.Struct, frozen=True, kw_only=True):
    """One trace. Seconds are simulated ones."""

    scenario: str
    policy: str
    router: RouterPolicy
    fits: int  # models whose components a rank's budget holds; 0: no limit
    seed: int
    mean: float | None  # latency of requests with a picture; None: there is none
    p99: float | None
    goodput: float  # requests in time per second
    in_time: float  # their share of all
    failed: float  # share of all
    loads: float  # components per request
    least_loads: float  # the fewest of any one that serves requests in the order they come, see `least_loads`
    gigabytes: float  # loaded, per request
    wait: float  # seconds from arrival until a request begins, the mean over all
    wait_for_loads: float  # of these, while no rank had the model: as a share
    wait_beside_idle: float  # while a rank without work had the model: as a share
    waited: float  # share of requests that waited for a load
    avoidable: int  # requests that waited for a load although another rank had a copy
    deaths: int  # of ranks
    gave_up: bool  # whether the engine has, because a rank kept dying
    wall_seconds: float  # what the run took


def simulate(scenario: ModelScenario, policy: str, seed: int, router: RouterPolicy = "mask-aware") -> ModelRun:
    """One run."""
    start = time.perf_counter()
    served = serve(scenario, policy, seed, router=router)
    number = len(served.latencies) + served.failures.total()
    latencies, watches = list(served.latencies.values()), served.watches
    waiting, for_loads, beside_idle = (
        sum(getattr(watch, name) for watch in watches)
        for name in ("waiting", "waiting_for_loads", "waiting_beside_idle")
    )
    return ModelRun(
        scenario=scenario.name,
        policy=policy,
        router=router,
        fits=scenario.fits,
        seed=seed,
        mean=fmean(latencies) if latencies else None,
        p99=percentile(latencies, 0.99) if latencies else None,
        goodput=served.in_time / served.seconds,
        in_time=served.in_time / number,
        failed=served.failures.total() / number,
        loads=len(served.loaded) / number,
        least_loads=_least_loads(scenario, seed) / number,
        gigabytes=_gigabytes(served) / number,
        wait=waiting / number,
        wait_for_loads=_share(for_loads, waiting),
        wait_beside_idle=_share(beside_idle, waiting),
        waited=len(served.waited_for_loads) / number,
        avoidable=len(served.avoidable),
        deaths=served.num_deaths,
        gave_up=served.has_given_up,
        wall_seconds=time.perf_counter() - start,
    )


def _gigabytes(served: Served) -> float:
    return sum(loaded.nbytes for loaded in served.loaded) / 1e9


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# ------------------------------------------------------------------------------------------------- the optimum


def least_loads(models: Sequence[str], there: Sequence[str], places: int) -> int:
    """The loads of Belady's rule (1966): what is needed last makes room. No order of loads has fewer that serves these
    requests one after the other, each by its model. models: of the requests, in the order they come. there: what is
    loaded before the first. places: models that fit on all ranks together.
    """
    next_use, after = list[int](), dict[str, int]()
    for index in reversed(range(len(models))):
        next_use.append(after.get(models[index], len(models)))
        after[models[index]] = index
    loaded = {name: after.get(name, len(models)) for name in there[:places]}
    number = 0
    for name, following in zip(models, reversed(next_use), strict=True):
        if name not in loaded:
            number += 1
            if len(loaded) >= places:
                del loaded[max(loaded, key=loaded.__getitem__)]
        loaded[name] = following
    return number


def lru_loads(weights: Sequence[float], places: int) -> float:
    """Share of requests that find their model dropped where the least recently used one makes room: the approximation
    of Che, Tung and Wang (2002). weights: of the requests to each model.
    """
    shares, low, high = np.array(weights) / sum(weights), 0.0, 1.0
    if places >= len(shares):
        return 0.0

    def occupied(requests: float) -> float:
        return float((1.0 - np.exp(-shares * requests)).sum())

    while occupied(high) < places:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if occupied(middle) < places else (low, middle)
    return float((shares * np.exp(-shares * high)).sum())


def _least_loads(scenario: ModelScenario, seed: int) -> int:
    """The fewest loads (Belady), where a model's own components are loaded together and shared ones never leave."""
    names = list(scenario.models.models)
    places = scenario.num_engines * scenario.num_ranks * scenario.fits if scenario.fits else len(names)
    return least_loads([request.model for request in scenario.trace(seed)], names, places)


# ------------------------------------------------------------------------------------------------- reports


def compare(
    names: Sequence[str],
    policies: Sequence[str],
    routers: Sequence[RouterPolicy],
    fits: Sequence[int] | None,
    seeds: int,
    processes: int,
    output: Path | None,
) -> list[ModelRun]:
    """Run scenarios of MODEL_SCENARIOS and print what they give. routers: of scenarios with several engines. fits:
    instead of the scenario's own.
    """
    runs: list[tuple[ModelScenario, str, int, RouterPolicy]] = [
        (replace(MODEL_SCENARIOS[name], fits=number), policy, seed, router)
        for name in names
        for number in (fits or [MODEL_SCENARIOS[name].fits])
        for policy in policies
        for router in (routers if MODEL_SCENARIOS[name].num_engines > 1 else routers[-1:])
        for seed in range(seeds)
    ]
    found = list[ModelRun]()
    with get_context("forkserver").Pool(processes) as pool:
        for run in pool.imap(_simulate, runs):
            found.append(run)
            print_line(msgspec.to_builtins(run), output)
    for line in table(found):
        print(line)
    return found


def _simulate(run: tuple[ModelScenario, str, int, RouterPolicy]) -> ModelRun:
    return simulate(*run)


def table(runs: Sequence[ModelRun]) -> Iterator[str]:
    """Means over seeds."""
    for scenario in dict.fromkeys(run.scenario for run in runs):
        yield ""
        yield f"{scenario}: means over seeds; seconds, and per request"
        yield (
            "fits  policy               router             mean    P99  in time   failed   loads   least      GB  "
            "  wait  for loads  beside idle  waited  avoidable  deaths"
        )
        of_scenario = [run for run in runs if run.scenario == scenario]
        for row in dict.fromkeys(map(_row_of, of_scenario)):
            yield _row([run for run in of_scenario if _row_of(run) == row])


def _row_of(run: ModelRun) -> tuple[int, str, str]:
    return run.fits, run.policy, run.router


def _row(runs: Sequence[ModelRun]) -> str:
    def mean(field: str) -> float:
        values = [value for run in runs if (value := getattr(run, field)) is not None]
        return fmean(values) if values else math.nan

    return (
        f"{runs[0].fits:>4}  {runs[0].policy:<20} {runs[0].router:<14} "
        f"{mean('mean'):6.2f} {mean('p99'):6.1f}  {mean('in_time'):7.1%}  "
        f"{mean('failed'):7.1%}  {mean('loads'):6.3f}  {mean('least_loads'):6.3f}  {mean('gigabytes'):6.2f}  "
        f"{mean('wait'):6.2f}  {mean('wait_for_loads'):9.0%}  {mean('wait_beside_idle'):11.0%}  {mean('waited'):6.1%}  "
        f"{sum(run.avoidable for run in runs):>9}  {mean('deaths'):6.1f}"
    )
