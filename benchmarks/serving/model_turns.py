"""Five models that take turns in the memory of two ranks: a server, and the simulation of it with the same requests.

The models are small random checkpoints that share nothing. What batches and loads take is measured in the server; the
simulation gets the means, and the requests as they reached the engine. A latency is from there to the end of the last
batch. Memory for three models on each rank holds all five; for two or one it does not.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TypeVar

import msgspec
import numpy as np

from benchmarks.command import command
from benchmarks.load.client import Target
from benchmarks.load.dataset import Mix, synthetic
from benchmarks.report import Value, print_report
from benchmarks.serving.recorded import Arrival, Batch, Loading, read_loading
from benchmarks.serving.recorded_server import RecordedServer, recorded_server
from benchmarks.simulation.clock import Clock
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.durations import Durations
from benchmarks.simulation.engine import SimulatedEngine
from benchmarks.simulation.load_watch import LoadWatch, WatchedScheduler
from benchmarks.simulation.model_ranks import ModelRanks, Poison
from benchmarks.simulation.model_set import zipf
from core.config import ModelConfig, SchedulerConfig
from core.graph.work import Work
from core.handles import LoadedComponent, ModelKey
from core.messages.engine import Finished, Output
from core.messages.worker import Batch as SentBatch
from core.model_info import ModelInfo
from core.scheduling.requests.bindings import Bindings
from model_executor.worker.loading.resident import ResidentModels
from tools.random_checkpoints import make_flux_fill

Key = TypeVar("Key")

NUM_MODELS, NUM_RANKS = 5, 2
SLACK = 1.05
SETTLED_SECONDS = 3.0
"""Without a load for so long, a server has loaded what fits."""


@dataclass(frozen=True)
class Served:
    """What one run measured: (seconds, model) of each request, and the loads since the first of them came."""

    latencies: list[tuple[float, str]]
    loads: int

    @property
    def mean(self) -> float:
        return fmean(seconds for seconds, _ in self.latencies)


@dataclass(frozen=True)
class Models:
    """What is known of the models without loading them. budgets: places on a rank -> bytes."""

    infos: dict[str, ModelInfo]
    sizes: dict[ModelKey, int]
    flags: list[str]

    @classmethod
    def make(cls, folder: Path) -> Models:
        """Write the checkpoints."""
        paths = {f"m{number}": str(make_flux_fill(folder / f"m{number}", seed=number)) for number in range(NUM_MODELS)}
        configs = [
            ModelConfig(model=path, served_model_name=name, dtype="float32", device="cpu", threads=1, mask_aware=False)
            for name, path in paths.items()
        ]
        ready = ResidentModels.open(configs).ready(0)
        infos = {info.name: info for info in ready.models}
        flags = [flag for name, path in paths.items() for flag in ("--model", f"{name}={path}")]
        return cls(infos, {each.key: each.nbytes for each in ready.sizes}, flags)

    def budget(self, places: int) -> int:
        """Bytes of so many places. Buffers are loaded beside what the files hold."""
        largest = max(sum(self.sizes[key] for key in info.components) for info in self.infos.values())
        return round(SLACK * places * largest)


@dataclass(frozen=True)
class Measured(Durations):
    """Means of a server. batches: (op, items) -> seconds; items that were not seen take as long as the nearest number
    that was. pause: from the end of a batch to the next one. loads: kind of component -> seconds.
    """

    batches: Mapping[tuple[str, int], float]
    pause: float
    loads: Mapping[str, float]

    def batch_seconds(self, batch: SentBatch, work: Work) -> float:
        numbers = [number for op, number in self.batches if op == batch.op]
        return self.batches[batch.op, min(numbers, key=lambda number: abs(number - len(batch.items)))]

    def trip_seconds(self) -> float:
        return self.pause

    def pause_seconds(self) -> float:
        return self.pause

    def load_seconds(self, key: ModelKey) -> float:
        return self.loads[key.component]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, steps=8, edits=120, seed=0)
    parser.add_argument("--request-rate", type=float, default=4.0, help="edits per second")
    parser.add_argument("--fits", type=int, nargs="+", default=[3, 2, 1], help="models that fit on a rank")
    args = parser.parse_args(argv)
    rows, result = list[tuple[str, str]](), dict[str, Value]({"benchmark": "model_turns"})
    with tempfile.TemporaryDirectory() as folder:
        models = Models.make(Path(folder))
        for places in args.fits:
            real, simulated = compare(models, places, args)
            for name, served in (("server", real), ("simulated", simulated)):
                text = f"mean {served.mean * 1e3:.0f} ms, {served.loads} loads of components"
                rows.append((f"room for {places}, {name}", text))
                result |= {f"fits_{places}_{name}_ms": served.mean * 1e3, f"fits_{places}_{name}_loads": served.loads}
    print_report(f"{NUM_MODELS} models on {NUM_RANKS} ranks, {args.edits} edits", rows, result, args.output)


def compare(models: Models, places: int, args: argparse.Namespace) -> tuple[Served, Served]:
    """(a server's, the simulation's) with so many places on a rank."""
    random = np.random.default_rng(args.seed)
    weights = np.array(zipf(NUM_MODELS, 1.0))
    names = random.choice(list(models.infos), args.edits, p=weights / weights.sum())
    due = random.exponential(1.0 / args.request_rate, args.edits).cumsum().tolist()
    mix = Mix("fixed:0.2", "fixed:4", num_inference_steps=str(args.steps), sizes="128x128")
    calls = [
        replace(call, model=str(name)) for call, name in zip(synthetic(mix, args.edits, random), names, strict=True)
    ]
    budget = models.budget(places)
    with _server(models, budget) as server:
        _wait_until_settled(server)
        target = Target(server.server.url, extra={"mask_aware": False})
        alone = server.send_on_time(target, calls, due)
        loading = read_loading(server.path)
    real = _served(alone.arrivals, alone.batches, loading)
    measured = Measured(_batch_means(alone.batches), _pause(alone.batches), _load_means(loading))
    return real, simulate(models, budget, measured, alone.arrivals)


@contextmanager
def _server(models: Models, budget: int) -> Iterator[RecordedServer]:
    flags = ["--dtype", "float32", "--threads", "1", "--no-playground", "--workers-per-engine", str(NUM_RANKS)]
    with recorded_server([*models.flags, *flags, "--model-bytes", str(budget)], OURS) as server:
        yield server


def _wait_until_settled(server: RecordedServer) -> None:
    number = -1
    while (found := len(read_loading(server.path))) != number:
        number = found
        time.sleep(SETTLED_SECONDS)


def _served(arrivals: Sequence[Arrival], batches: Sequence[Batch], loading: Sequence[Loading]) -> Served:
    ends = {name: batch.ended for batch in batches for name in batch.requests}
    heads = [(each, each.request) for each in arrivals]
    latencies = [(ends[head.request_id] - each.now, head.model) for each, head in heads]
    first = arrivals[0].now
    return Served(latencies, sum(when >= first for when, _, _ in loads_ended(loading)))


def loads_ended(loading: Sequence[Loading]) -> Iterator[tuple[float, ModelKey, float]]:
    """(when, component, seconds) of each load: a rank loads one component after the other."""
    by_rank = defaultdict[int, list[Loading]](list)
    for each in loading:
        by_rank[each.rank].append(each)
    for of_rank in by_rank.values():
        for before, after in pairwise(of_rank):
            for key in set(before.keys) - set(after.keys):
                yield after.now, key, after.now - before.now


def _load_means(loading: Sequence[Loading]) -> dict[str, float]:
    return _means((key.component, seconds) for _, key, seconds in loads_ended(loading))


def _batch_means(batches: Sequence[Batch]) -> dict[tuple[str, int], float]:
    return _means(((batch.op, len(batch.requests)), batch.seconds) for batch in batches if batch.requests)


def _means(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    found = defaultdict[Key, list[float]](list)
    for key, seconds in pairs:
        found[key].append(seconds)
    return {key: fmean(values) for key, values in found.items()}


def _pause(batches: Sequence[Batch]) -> float:
    """Mean seconds between two batches of one request that come one after the other on a rank."""
    by_rank = defaultdict[int, list[Batch]](list)
    for batch in batches:
        by_rank[batch.rank].append(batch)
    pairs = (pair for of_rank in by_rank.values() for pair in pairwise(of_rank))
    gaps = [after.started - before.ended for before, after in pairs if set(before.requests) & set(after.requests)]
    return max(0.0, fmean(gaps))


def simulate(models: Models, budget: int, durations: Durations, arrivals: Sequence[Arrival]) -> Served:
    """Serve these requests in simulated time, after all that fits was loaded."""
    clock, ends = Clock(), dict[str, float]()
    ranks = ModelRanks(NUM_RANKS, models.infos, models.sizes, budget, Poison(), 0.0, Random(0))
    sizes = [LoadedComponent(key, nbytes) for key, nbytes in models.sizes.items()]
    scheduler = WatchedScheduler(SchedulerConfig(model_bytes=budget), models.infos, NUM_RANKS, sizes=sizes)
    bindings = Bindings(models.infos)
    scheduler.watch = LoadWatch(ranks.memory, {name: bindings.needs(name) for name in models.infos})
    scheduler.learn((), [(rank, ranks.start(rank)) for rank in range(NUM_RANKS)])

    def note(outputs: tuple[Output, ...]) -> None:
        ends.update((each.request_id, clock.now) for each in outputs if isinstance(each, Finished))

    engine = SimulatedEngine(clock, scheduler, durations, note, ranks)
    engine.step()
    clock.run()
    ranks.loaded.clear()
    start, first, heads = clock.now, arrivals[0].now, dict[str, tuple[float, str]]()
    for arrival in arrivals:
        request = arrival.request
        due = start + arrival.now - first
        heads[request.request_id] = due, request.model
        moved = msgspec.structs.replace(request, arrival=due, deadline=None, objective=None)
        clock.at(due, partial(engine.add, moved))
    clock.run()
    return Served([(ends[name] - due, model) for name, (due, model) in heads.items()], len(ranks.loaded))


if __name__ == "__main__":
    main()
