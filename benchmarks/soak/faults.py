"""The faults that are injected into the processes and files of the server under test, and into no others.

An engine is given up after several deaths without a minute of service between them (`EngineReplica`), so the order of
the faults spreads deaths over the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.load.ray_machines import Machines
from benchmarks.soak.edits import PLAIN
from benchmarks.soak.memory import Member, Role, Tree
from benchmarks.soak.misbehaviour import hang_up
from benchmarks.soak.users import Crowd

BURST = 60
RECOVERY_SECONDS = 240.0
"""Time limit for all engines to serve again after a fault; the machine may be shared."""
UNWRITABLE_SECONDS = 15.0
MAX_FILE_BYTES = 64 * 1024
"""Less than a cache entry, as on a full disk."""


@dataclass
class Site:
    """The server under test. pages: the folder of the disk tier. num_ranks: workers of each engine. checkpoints: model
    -> its folder, of models that take turns. machines: where its engines are, if not on the server's own. noticed:
    (fault, seconds until the server knew, most that it may take).
    """

    tree: Tree
    pages: Path
    crowd: Crowd
    probe: httpx.AsyncClient
    pick: random.Random
    num_engines: int
    num_ranks: int
    checkpoints: Mapping[str, Path]
    machines: Machines | None = None
    noticed: list[tuple[str, float, float]] = field(default_factory=list)

    async def ask(self, path: str) -> dict[str, Any]:
        """The JSON answer of a path that always works."""
        return (await self.probe.get(path)).json()  # type: ignore[no-any-return]

    async def all_serve(self) -> bool:
        """Whether every engine has its workers and serves. Processes show a death earlier than the server's pages."""
        if len(self.tree.of("worker")) != self.num_engines * self.num_ranks:
            return False
        ranks = await self.ranks()
        are_up = len(ranks) == self.num_engines * self.num_ranks and all(rank["alive"] for rank in ranks)
        return are_up and (await self.ask("/health"))["status"] == "ok"

    async def serves(self, engine: int) -> bool:
        """Whether the server takes an engine to be there."""
        return bool((await self.ask("/health"))["engines"][engine]["alive"])

    async def ranks(self) -> list[dict[str, Any]]:
        """What the server says of all workers."""
        engines = (await self.ask("/v1/engine/stats"))["engines"]
        return [rank for engine in engines for rank in engine["ranks"] or ()]

    async def num_deaths(self) -> int:
        """Of workers whose engine lives, as the server has noticed them."""
        return sum(rank["deaths"] for rank in await self.ranks())

    async def recovered(self) -> None:
        """Waits until every engine serves. Raises TimeoutError after RECOVERY_SECONDS."""
        async with asyncio.timeout(RECOVERY_SECONDS):
            while not await self.all_serve():
                await asyncio.sleep(0.1)

    async def busy(self, rank: int) -> bool:
        """Whether an engine runs a step, by its last report."""
        load = (await self.ask("/v1/engine/stats"))["engines"][rank]["load"]
        return bool(load and load["num_running"])

    async def wait_busy(self, rank: int) -> None:
        """Waits until it is, for 8 s at most: the router may send everything to the other engine."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(8):
                while not await self.busy(rank):
                    await asyncio.sleep(0.02)


Act = Callable[[Site, int], Awaitable[None]]
"""act(site, turn): turn counts the rounds through all faults, and selects the engine."""


def strike(role: Role, number: signal.Signals, shift: int = 0) -> Act:
    """Kill or stop this process of one engine while it is busy. shift: added to the turn to select the engine."""

    async def act(site: Site, turn: int) -> None:
        rank = (turn + shift) % site.num_engines
        await site.wait_busy(rank)
        await _end(site, role, rank, number)

    return act


async def kill_engine_twice(site: Site, turn: int) -> None:
    """The second time as soon as it serves again."""
    rank = turn % site.num_engines
    for _ in range(2):
        await _end(site, "engine", rank, signal.SIGKILL)
        await site.recovered()


async def kill_all_engines(site: Site, turn: int) -> None:
    async with asyncio.TaskGroup() as group:
        for rank in range(site.num_engines):
            group.create_task(_end(site, "engine", rank, signal.SIGKILL))


async def kill_one_worker(site: Site, turn: int) -> None:
    """While its engine is busy; until the server says so. The others live on."""
    await site.wait_busy(0)
    deaths = await site.num_deaths()
    _signal([site.pick.choice(site.tree.of("worker", 0))], signal.SIGKILL)
    async with asyncio.timeout(RECOVERY_SECONDS):
        while await site.num_deaths() == deaths:
            await asyncio.sleep(0.1)


async def take_weights_away(site: Site, turn: int) -> None:
    """Until a load of the model has failed. It must serve again when they are back."""
    name, folder = [*site.checkpoints.items()][turn % len(site.checkpoints)]
    (weights,) = folder.glob("transformer/*.safetensors")
    aside = weights.with_suffix(".aside")
    weights.rename(aside)
    try:
        await _until_state(site, name, "failed")
    finally:
        aside.rename(weights)
    await _until_state(site, name, "loaded")


async def _until_state(site: Site, model: str, state: str) -> None:
    """Waits until a model is in a state, which its requests bring about. Raises TimeoutError."""
    async with asyncio.timeout(RECOVERY_SECONDS):
        while {each["id"]: each["state"] for each in (await site.ask("/v1/models"))["data"]}[model] != state:
            await asyncio.sleep(0.1)


async def kill_image_processor(site: Site, turn: int) -> None:
    members = site.tree.of("images")
    _signal(site.pick.sample(members, min(1, len(members))), signal.SIGKILL)


def _flip_a_bit(file: Path, pick: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[pick.randrange(len(content))] ^= 1 << pick.randrange(8)
    file.write_bytes(content)


DAMAGES: tuple[Callable[[Path, random.Random], object], ...] = (
    lambda file, pick: os.truncate(file, pick.randrange(file.stat().st_size)),
    _flip_a_bit,
    lambda file, pick: file.write_bytes(b"not a page"),
    lambda file, pick: file.unlink(),
    lambda file, pick: None,
)


async def damage_pages(site: Site, turn: int) -> None:
    """Truncate, flip a bit of, overwrite or delete most of the files."""
    for file in sorted(site.pages.glob("*.page")):
        with contextlib.suppress(FileNotFoundError, ValueError):  # gone, or empty already
            site.pick.choice(DAMAGES)(file, site.pick)


async def take_folder_away(site: Site, turn: int) -> None:
    """Replace the disk tier's folder by a file: nothing can be read or written there."""
    aside = site.pages.with_suffix(".aside")
    decoy = site.pages.with_suffix(".decoy")
    decoy.write_bytes(b"not a folder")
    _move_into_place(site.pages, away=aside, new=decoy)
    try:
        await asyncio.sleep(UNWRITABLE_SECONDS)
    finally:
        _move_into_place(site.pages, away=decoy, new=aside)
        decoy.unlink()


async def fill_disk(site: Site, turn: int) -> None:
    """Limit the size of the workers' files: for them it is a full disk."""
    workers = site.tree.of("worker")
    async with contextlib.AsyncExitStack() as limits:
        for worker in workers:
            await limits.enter_async_context(_small_files(worker.process))
        await asyncio.sleep(UNWRITABLE_SECONDS)


async def burst(site: Site, turn: int) -> None:
    """Sixty edits at once: some are refused, and retried when retry-after says."""
    edits = [edit for edit in site.crowd.edits if edit.steps <= 8 and edit.n == 1]
    async with asyncio.TaskGroup() as group:
        for number in range(BURST):
            group.create_task(site.crowd.ask(edits[number % len(edits)], PLAIN))


async def hang_up_at_once(site: Site, turn: int) -> None:
    """Thirty clients that disconnect."""
    async with asyncio.TaskGroup() as group:
        for _ in range(30):
            group.create_task(hang_up(site.crowd.url, site.pick))


FAULTS: dict[str, Act] = {
    "worker killed": strike("worker", signal.SIGKILL),
    "pages damaged": damage_pages,
    "engine killed": strike("engine", signal.SIGKILL, shift=1),
    "image processor killed": kill_image_processor,
    "worker stopped": strike("worker", signal.SIGSTOP),
    "page folder away": take_folder_away,
    "engine stopped": strike("engine", signal.SIGSTOP, shift=1),
    "burst": burst,
    "clients gone": hang_up_at_once,
    "engine killed twice": kill_engine_twice,
    "disk full": fill_disk,
    "all engines killed": kill_all_engines,
}


SPARE_WORKERS = frozenset(
    ("pages damaged", "image processor killed", "page folder away", "burst", "clients gone", "disk full")
)
"""Those that end no worker."""


async def inject(act: Act, site: Site, turn: int) -> float:
    """Inject a fault; seconds until all engines serve again. Raises TimeoutError after RECOVERY_SECONDS."""
    start = time.monotonic()
    try:
        await act(site, turn)
        await site.recovered()
    finally:
        _let_go(site)
    return time.monotonic() - start


def _signal(members: list[Member], number: signal.Signals) -> None:
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.process.send_signal(number)


async def _end(site: Site, role: Role, rank: int, number: signal.Signals) -> None:
    """Kill or stop a process of an engine, and wait until it is gone; with an engine its workers end."""
    engines, workers = site.tree.of("engine", rank), site.tree.of("worker", rank)
    together = [*engines, *workers] if role == "engine" else workers
    _signal([member for member in together if member.role == role], number)
    async with asyncio.timeout(RECOVERY_SECONDS):
        while any(_is_there(member.process) for member in together):
            await asyncio.sleep(0.1)


def _is_there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _let_go(site: Site) -> None:
    """Resume what is still stopped."""
    for member in site.tree.members():
        with contextlib.suppress(psutil.NoSuchProcess):
            if member.process.status() == psutil.STATUS_STOPPED:
                member.process.resume()


def _move_into_place(path: Path, away: Path, new: Path) -> None:
    """Move `path` away and `new` into its place; a worker may create a folder there in between."""
    path.rename(away)
    while new.exists():
        try:
            new.rename(path)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.asynccontextmanager
async def _small_files(process: psutil.Process) -> AsyncIterator[None]:
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (MAX_FILE_BYTES, before[1]))
    yield
    with contextlib.suppress(psutil.NoSuchProcess):
        process.rlimit(psutil.RLIMIT_FSIZE, before)
