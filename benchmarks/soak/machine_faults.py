"""Faults of the machines of a Ray cluster, in the processes of a soak's own cluster on this computer.

Whoever kills or stops something here waits until the server has noticed, and makes room for the engine again.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from benchmarks.load.ray_machines import hosts_of, is_there
from benchmarks.soak.faults import RECOVERY_SECONDS, Act, Site, strike

KILLED_SECONDS, STOPPED_SECONDS = 2.0, 10.0
"""Within which the server must notice what is killed, and what is stopped."""

Family = list[psutil.Process]


def disturb(kind: str, number: signal.Signals, family: Callable[[Site, int], Family]) -> Act:
    """Send a signal to what runs an engine, while it is busy. kind: to be told of. family: the processes, of the engine
    with this index."""

    async def act(site: Site, turn: int) -> None:
        rank = turn % site.num_engines
        await site.wait_busy(rank)
        victims = family(site, rank)
        assert victims, kind
        for process in victims:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        began = time.monotonic()
        async with asyncio.timeout(RECOVERY_SECONDS):
            while await site.serves(rank):
                await asyncio.sleep(0.02)
        is_killed = number == signal.SIGKILL
        most = KILLED_SECONDS if is_killed else STOPPED_SECONDS
        site.noticed.append((kind, time.monotonic() - began, most))
        if not is_killed:
            await asyncio.sleep(STOPPED_SECONDS)  # its engine begins again elsewhere meanwhile, if there is room
            for process in victims:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
        await _make_room(site, rank)

    return act


async def _make_room(site: Site, rank: int) -> None:
    """As many machines as engines, until the engine serves again: one that goes on after a stop may end itself."""
    assert site.machines is not None
    async with asyncio.timeout(RECOVERY_SECONDS):
        while not await site.serves(rank):
            if sum(map(is_there, site.machines.raylets)) < site.num_engines:
                await asyncio.to_thread(site.machines.add)
            await asyncio.sleep(1.0)


def _host(site: Site, rank: int) -> Family:
    return [member.process for member in site.tree.of("host", rank)]


def _raylet(site: Site, rank: int) -> Family:
    assert site.machines is not None
    hosts = _host(site, rank)
    return [raylet for raylet in site.machines.raylets if set(hosts_of(raylet)) & set(hosts)]


def _machine(site: Site, rank: int) -> Family:
    raylets = _raylet(site, rank)
    return [*raylets, *(process for raylet in raylets for process in raylet.children(recursive=True))]


MACHINE_FAULTS: dict[str, Act] = {
    "host killed": disturb("host killed", signal.SIGKILL, _host),
    "machine stopped": disturb("machine stopped", signal.SIGSTOP, _machine),
    "raylet killed": disturb("raylet killed", signal.SIGKILL, _raylet),
    "engine killed": strike("engine", signal.SIGKILL, shift=1),
    "host stopped": disturb("host stopped", signal.SIGSTOP, _host),
    "worker killed": strike("worker", signal.SIGKILL),
    "machine killed": disturb("machine killed", signal.SIGKILL, _machine),
    "engine stopped": strike("engine", signal.SIGSTOP, shift=1),
    "raylet stopped": disturb("raylet stopped", signal.SIGSTOP, _raylet),
}
"""By name, in the order in which a soak injects them."""
