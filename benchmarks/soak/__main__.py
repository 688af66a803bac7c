"""Soak: minutes of mixed traffic on a server with two engines, with a fault every half minute; or, with
--single-deaths, on one engine with two workers, one of which is killed every 20 seconds; --turns adds models that
take turns, and loads that fail; --ray has two engines on two machines of a Ray cluster on this computer, one of which
is killed or stopped every minute.

Every returned picture is compared with that of an undisturbed run of the same edit. Prints requests, lost, wrong,
restarts, steps repeated and memory slope, and a line of JSON. Exit status 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import get_args

import httpx
import psutil

from benchmarks.command import command
from benchmarks.load.ray_machines import FOLDER_VARIABLE, Machines, machines
from benchmarks.load.server import STOP_SECONDS, Server, start_server
from benchmarks.report import Value, percentile, print_report
from benchmarks.soak.checking import Ledger, References
from benchmarks.soak.faults import FAULTS, SPARE_WORKERS, Act, Site, inject
from benchmarks.soak.memory import (
    MB,
    ROLES,
    WORKER_WARM_UP_SECONDS,
    Role,
    Sample,
    Samples,
    Tree,
    holdings,
    processes_of,
    shared_memory_files,
)
from benchmarks.soak.resumes import Resumes
from benchmarks.soak.sending import Sender
from benchmarks.soak.setups import ENGINES, ON_RAY, SINGLE_DEATHS, TURNS, Setup
from benchmarks.soak.users import Crowd
from core.handles import CacheResult

FLAGS = (
    *("--threads", "1", "--dtype", "float32", "--max-queue", "32", "--log-level", "info", "--log-format", "json"),
    *("--cache-host-bytes", "12M", "--cache-disk-bytes", "24M", "--template-bytes", "2M"),
)
"""Each tier holds a few templates, so that pages are primed, evicted, written and loaded all the time. In bfloat16 a
picture depends on the edits that share its steps, so it could not be compared."""
SAMPLE_SECONDS = 5.0
WARM_UP_SHARE, WARM_UP_SECONDS = 0.3, 300.0
"""Memory is judged after this share of the time, at the latest after these seconds."""
QUIET_SECONDS = 15.0  # time limit for the queue to be empty after the traffic
MAX_SLOPE = 1.0  # MB per minute, of all processes but workers together; and of a warm worker, where no fault ends one
JUDGED: tuple[Role, ...] = ("server", "engine", "images")
SLOPE_MINUTES = 10.0  # a soak this long must give a slope; shorter ones may end before there is one


@dataclass
class Record:
    """Measurements beside the ledger. recoveries: seconds from each fault until all engines served."""

    samples: Samples
    recoveries: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # of the server as a whole, for people
    restarts: int = 0  # of engines
    steps_repeated: int = 0  # as the server's metrics say
    resumes: Resumes = field(default_factory=Resumes)
    num_faults: int = 0
    noticed: list[tuple[str, float, float]] = field(default_factory=list)  # as of a Site


def main(argv: Sequence[str] | None = None) -> int:
    parser = command(__doc__, seed=0)
    parser.add_argument("--minutes", type=float, default=20.0, help="of traffic")
    faults = parser.add_mutually_exclusive_group()
    faults.add_argument("--faults", nargs="+", choices=FAULTS, metavar="NAME", help=f"only: {', '.join(FAULTS)}")
    faults.add_argument("--single-deaths", action="store_true", help="kill single workers of one engine, and no more")
    faults.add_argument(
        "--turns", action="store_true", help="the same with five models, of which each worker has one at a time"
    )
    faults.add_argument(
        "--ray",
        action="store_true",
        help="engines on machines of a Ray cluster; in a network namespace, `make soak-ray`",
    )
    parser.add_argument(
        "--joint-steps", action="store_true", help="with --single-deaths: both compute each step together"
    )
    args = parser.parse_args(argv)
    if args.joint_steps and not args.single_deaths:
        parser.error("--joint-steps needs --single-deaths")
    folder = Path(tempfile.mkdtemp(prefix="stencil-soak-"))
    ledger = Ledger(folder)
    record = Record(Samples(min(WARM_UP_SECONDS, args.minutes * 60 * WARM_UP_SHARE)))
    _soak(args, folder, ledger, record)
    is_good = _report(args, ledger, record)
    if is_good:
        shutil.rmtree(folder)
    else:
        print(f"log, incidents and pictures: {folder}", file=sys.stderr)
    return 0 if is_good else 1


def _setup(args: argparse.Namespace) -> Setup:
    if args.turns:
        return TURNS
    if args.ray:
        return ON_RAY
    if not args.single_deaths:
        return ENGINES
    return replace(SINGLE_DEATHS, degree=SINGLE_DEATHS.num_ranks) if args.joint_steps else SINGLE_DEATHS


def _soak(args: argparse.Namespace, folder: Path, ledger: Ledger, record: Record) -> None:
    setup, scratch, pages = _setup(args), folder / "scratch", folder / "pages"
    scratch.mkdir()
    pages.mkdir(mode=0o700)
    checkpoints, references = setup.make_checkpoints(folder / "models"), References(ledger)
    shared, flags = shared_memory_files(), [*FLAGS, *setup.flags(checkpoints), "--cache-dir", str(pages)]
    environment = {"TMPDIR": str(scratch), "XDG_CACHE_HOME": str(folder / "cache")}
    with ExitStack() as stack:
        log, found = stack.enter_context((folder / "server.log").open("wb")), None
        if setup.is_on_ray:
            with start_server(FLAGS, environment=environment, log=log) as here:
                asyncio.run(_learn(here, references, ledger))
            found = stack.enter_context(_cluster(folder / "r", record))
            flags += ["--data-parallel-backend", "ray", "--ray-address", found.address]
        with start_server(flags, environment=environment, log=log) as server:
            server.wait_for("/ready")
            tree = Tree(server.process.pid, setup.num_ranks, found)
            asyncio.run(_disturb(args, server, tree, pages, checkpoints, references, record))
            _end(server, record)
        _look_for_leftovers(scratch, shared, found, record)
    record.resumes = Resumes.of_log(folder / "server.log")
    _check_resumes(setup, record)


async def _learn(server: Server, references: References, ledger: Ledger) -> None:
    """Takes the references from a server that is on this machine alone."""
    server.wait_for("/ready")
    sender = Sender(server.url, ledger)
    await Crowd(server.url, sender, references, ledger, 0, [""]).learn()
    await sender.aclose()


@contextmanager
def _cluster(folder: Path, record: Record) -> Iterator[Machines]:
    """Two machines, of which nothing may be left."""
    (folder / "scratch").mkdir(parents=True)
    with machines(folder, TMPDIR=str(folder / "scratch")) as found:
        yield found
    if left := processes_of(folder, FOLDER_VARIABLE):
        record.failures.append(f"processes of the cluster left behind: {left}")
    if files := list((folder / "scratch").iterdir()):
        record.failures.append(f"files left behind on machines: {files}")


async def _disturb(
    args: argparse.Namespace,
    server: Server,
    tree: Tree,
    pages: Path,
    checkpoints: Mapping[str, Path],
    references: References,
    record: Record,
) -> None:
    """Takes the references, runs traffic and faults for `minutes`, then checks that the queue empties."""
    ledger = references.ledger
    sender = Sender(server.url, ledger)
    crowd = Crowd(server.url, sender, references, ledger, args.seed, [*checkpoints] or [""])
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as probe:
        setup = _setup(args)
        sizes, noticed = (setup.num_engines, setup.num_ranks), record.noticed
        site = Site(tree, pages, crowd, probe, random.Random(args.seed), *sizes, checkpoints, tree.machines, noticed)
        await site.recovered()
        await crowd.learn()
        print(f"{ledger.seconds:6.0f} s  references taken, {_told(ledger)}", flush=True)
        async with asyncio.TaskGroup() as group:
            _begin_traffic(group, crowd)
            sampling = group.create_task(_sample(site, record))
            await _inject_faults(args, site, record)
            crowd.stopping.set()
            sampling.cancel()
        await _check_quiet(site, record)
        late = (each for each in record.noticed if each[1] > each[2])
        record.failures += [f"{kind}: noticed after {seconds:.1f} s" for kind, seconds, _ in late]
        record.restarts = await _total(probe, "engine_restarts")
        record.steps_repeated = await _total(probe, "steps_repeated")
    await sender.aclose()


def _begin_traffic(group: asyncio.TaskGroup, crowd: Crowd) -> None:
    for _ in range(3):
        group.create_task(crowd.run(crowd.ask_again))
    group.create_task(crowd.run(crowd.ask_fresh, pause=3.0))
    group.create_task(crowd.run(crowd.ask_hastily, pause=10.0))
    group.create_task(crowd.run(crowd.look_around, pause=2.0))
    group.create_task(crowd.run(crowd.misbehave, pause=2.0))
    group.create_task(crowd.run(crowd.walk_away, pause=4.0))
    group.create_task(crowd.run(crowd.keep_templates, pause=4.0))


async def _inject_faults(args: argparse.Namespace, site: Site, record: Record) -> None:
    """One every `fault_seconds`, later if the one before takes long."""
    setup = _setup(args)
    faults = args.faults or list(setup.faults)
    due = time.monotonic()
    end = due + args.minutes * 60
    for number in count():
        due = max(due + setup.fault_seconds, time.monotonic() + setup.calm_seconds)
        if due > end - setup.fault_seconds:
            break
        await asyncio.sleep(due - time.monotonic())
        fault = faults[number % len(faults)]
        await _inject(fault, setup.faults[fault], site, number // len(faults), record)
    await asyncio.sleep(end - time.monotonic())


async def _inject(fault: str, act: Act, site: Site, turn: int, record: Record) -> None:
    ledger = site.crowd.ledger
    ledger.note("fault", fault)
    record.num_faults += 1
    try:
        seconds = await inject(act, site, turn)
        record.recoveries.append(seconds)
        outcome = f"well again after {seconds:.1f} s"
    except (TimeoutError, httpx.HTTPError) as error:
        ledger.note("recovery", repr(error))
        outcome = "NOT WELL AGAIN"
        record.failures.append(f"{fault}: not well again")
    ledger.note("recovery", f"{fault}: {outcome}")
    print(f"{ledger.seconds:6.0f} s  {fault}: {outcome}; {_told(ledger)}", flush=True)


async def _sample(site: Site, record: Record) -> None:
    start = time.monotonic()
    while True:
        await asyncio.sleep(SAMPLE_SECONDS)
        is_whole = await _seems_well(site)
        held = await asyncio.to_thread(holdings, site.tree)
        record.samples.add(Sample(time.monotonic() - start, held, is_whole))
        megabytes = {role: round(nbytes / MB, 1) for role, nbytes in held.memory.items()}
        workers = [(worker.pid, round(worker.age), round(worker.memory / MB, 1)) for worker in held.workers]
        site.crowd.ledger.note("held", "whole" if is_whole else "in part", mb=megabytes, workers=workers)


async def _seems_well(site: Site) -> bool:
    """Whether all engines serve; False without an answer, which a fault may cause."""
    with suppress(httpx.HTTPError):
        return await site.all_serve()
    return False


async def _check_quiet(site: Site, record: Record) -> None:
    """Without traffic the queue must become empty."""
    deadline = time.monotonic() + QUIET_SECONDS
    while time.monotonic() < deadline:
        queue = (await site.ask("/v1/engine/stats"))["queue"]
        if not queue["admitted"] and not queue["running"] and not queue["waiting"]:
            return
        await asyncio.sleep(0.1)
    record.failures.append(f"still in the queue: {queue}")


async def _total(probe: httpx.AsyncClient, name: str) -> int:
    """The sum of a counter's series."""
    lines = (await probe.get("/metrics")).text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(f"stencil:{name}_total")))


def _end(server: Server, record: Record) -> None:
    server.process.terminate()
    started = time.monotonic()
    status = server.process.wait(STOP_SECONDS)
    if status != 0:
        record.failures.append(f"exit status {status} after SIGTERM")
    if time.monotonic() - started > 30:
        record.failures.append(f"left only {time.monotonic() - started:.0f} s after SIGTERM")


def _check_resumes(setup: Setup, record: Record) -> None:
    resumes = record.resumes
    if resumes.num_beyond_bound:
        record.failures.append(f"{resumes.num_beyond_bound} times too many steps were repeated after a death")
    if setup.may_restart:
        return
    if record.restarts:
        record.failures.append(f"{record.restarts} restarts of engines, although only workers died")
    if not resumes.every or resumes.steps_repeated != record.steps_repeated:
        record.failures.append(f"the metrics say {record.steps_repeated} steps repeated, the log: {resumes}")


def _look_for_leftovers(scratch: Path, shared: set[str], found: Machines | None, record: Record) -> None:
    """After the server has ended; its processes may take a moment to end too. found: where its engines were."""
    hosts = [] if found is None else found.hosts
    below = [each for host in hosts for each in (host, *host.children(recursive=True))]
    _, alive = psutil.wait_procs([*processes_of(scratch), *below], timeout=5)
    left = {"processes": alive, "shared memory": shared_memory_files() - shared, "files": list(scratch.iterdir())}
    record.failures += [f"{kind} left behind: {found}" for kind, found in left.items() if found]


def _told(ledger: Ledger) -> str:
    counts = ledger.counts
    names = ("requests", "pictures", "lost", "wrong", "rounded", "refused")
    return ", ".join(f"{counts[name]} {name}" for name in names)


def _report(args: argparse.Namespace, ledger: Ledger, record: Record) -> bool:
    """Prints everything; returns whether all bars are met."""
    counts, samples = ledger.counts, record.samples
    roles = [role for role in ROLES if role != "host" or _setup(args).is_on_ray]
    slope, slopes = samples.memory_slope(*JUDGED), {role: samples.memory_slope(role) for role in roles}
    growth = samples.worker_growth()
    if not counts["compared"]:
        record.failures.append("no picture was compared")
    if math.isnan(slope) and args.minutes >= SLOPE_MINUTES:
        record.failures.append("too few samples for a memory slope")
    recoveries = record.recoveries or [float("nan")]
    cache = " ".join(f"{counts[f'cache_{kind}']} {kind}" for kind in get_args(CacheResult))
    rows = [
        ("requests", f"{counts['requests']} in {counts['attempts']} attempts, {counts['refused']} of them refused"),
        ("pictures", f"{counts['pictures']}; cache: {cache}"),
        ("compared", f"{counts['compared']}, of them {counts['rounded']} not bit-identical, within rounding"),
        ("besides", f"{counts['bad_requests']} bad requests, {counts['hang_ups']} hang-ups, {counts['timeouts']} late"),
        ("lost", f"{counts['lost']}"),
        ("wrong", f"{counts['wrong']}"),
        ("faults", f"{record.num_faults}; well again after {percentile(recoveries, 0.5):.1f} s, P95 "
                   f"{percentile(recoveries, 0.95):.1f} s, at most {max(recoveries):.1f} s"),
        *([("noticed", _noticed(record))] if record.noticed else []),
        ("restarts", f"{record.restarts} of engines"),
        ("single deaths", f"{record.resumes}"),
        ("memory slope", f"{slope:+.2f} MB/min of {', '.join(JUDGED)}; "
                         + ", ".join(f"{role} {slopes[role]:+.2f}" for role in slopes)),
        ("of a worker", f"{growth:+.2f} MB/min after its first {WORKER_WARM_UP_SECONDS:g} s, in "
                        f"{samples.num_worker_lives()} lives"),
        ("memory", f"{_from_to(samples.memory())} MB, {_from_to(samples.memory('server'))} MB of the API server, "
                   f"{samples.warm_worker():.0f} MB of a warm worker"),
        ("descriptors", f"{_from_to(samples.fds())}, {_from_to(samples.fds('server'))} of the API server"),
        ("end", "; ".join(record.failures) or "status 0, nothing left behind"),
    ]  # fmt: skip
    measured = {"memory_slope": slope, "worker_growth": growth}
    measured |= {f"{role}_slope": value for role, value in slopes.items()}
    result: dict[str, Value] = {"benchmark": "soak", "minutes": args.minutes, "faults": record.num_faults}
    result |= {name: counts[name] for name in ("requests", "refused", "compared", "rounded", "lost", "wrong")}
    result |= {"failures": len(record.failures), "restarts": record.restarts}
    result |= {"resumed": len(record.resumes.every), "steps_repeated": record.resumes.steps_repeated}
    result |= {f"{name}_mb_per_min": value for name, value in measured.items() if not math.isnan(value)}
    print_report(f"Soak: {args.minutes:g} minutes, {_setup(args)}", rows, result, args.output)
    if args.faults and SPARE_WORKERS.issuperset(args.faults):  # otherwise few workers live long enough to be warm
        slope = max(slope, growth)
    return not (counts["lost"] or counts["wrong"] or record.failures or slope > MAX_SLOPE)


def _noticed(record: Record) -> str:
    """After how long the server knew of each fault."""
    return ", ".join(f"{kind} {seconds:.2f} s" for kind, seconds, _ in record.noticed)


def _from_to(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.0f} -> {ends[1]:.0f}"


if __name__ == "__main__":
    sys.exit(main())
