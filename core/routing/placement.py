"""Where engines are when their number follows a cluster: on each machine as many as it has room for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

PlaceState = Literal["waiting", "starting", "served", "draining", "gone"]
"""Of an engine. waiting: what it would have of its machine, others have. starting: it has not served yet. served: it
has, and may be restarting now. draining: it gets no more requests. gone: it was given up."""


class Machine(NamedTuple):
    """A machine of a cluster."""

    address: str
    room: int  # engines that it has room for
    is_draining: bool = False  # it is about to leave


class EnginePlace(NamedTuple):
    """An engine on a machine."""

    machine: str  # its id
    state: PlaceState
    is_idle: bool = False  # nobody waits for it


class Changes(NamedTuple):
    """What is to be done for the engines to be where they should."""

    start: tuple[str, ...]  # ids of machines, once for each engine that is to be started there
    drain: tuple[int, ...]  # numbers of engines that get no more requests
    leave: tuple[int, ...]  # numbers of engines that end now


def changes(machines: Mapping[str, Machine], engines: Mapping[int, EnginePlace], most: int) -> Changes:
    """Compare engines with machines. machines: by id. engines: by number. most: engines that there may be at once.

    Engines of a machine that is about to leave end after their requests, those of one that has left at once. A start
    measures costs, which other engines of the machine read: until one has served, only one starts there; until any has,
    only one starts at all, since a model that cannot be served is the same everywhere. A machine on which an engine was
    given up, or waits, gets no other.
    """
    leave = tuple(number for number, engine in engines.items() if _ends(engine, machines.get(engine.machine)))
    staying = {number: engine for number, engine in engines.items() if number not in leave}
    drain = (
        number
        for number, engine in staying.items()
        if machines[engine.machine].is_draining and engine.state == "served"
    )
    free = most - len(engines)
    is_proven = any(engine.state in ("served", "draining") for engine in engines.values())
    start: list[str] = []
    for key, machine in machines.items():
        here = [engine.state for engine in staying.values() if engine.machine == key]
        is_closed = machine.is_draining or "gone" in here or "waiting" in here
        number = 0 if is_closed else machine.room - len(here)
        if "served" not in here:
            number = min(number, 1 - here.count("starting"))
        if not is_proven:
            number = min(number, 1 - sum(engine.state == "starting" for engine in staying.values()) - len(start))
        start += [key] * max(0, min(number, free - len(start)))
    return Changes(tuple(start), tuple(drain), leave)


def _ends(engine: EnginePlace, machine: Machine | None) -> bool:
    """Whether an engine ends now. machine: its own; None: it has left."""
    if machine is None:
        return True
    if engine.state == "draining":
        return engine.is_idle
    return machine.is_draining and engine.state != "served"
