"""Decisions of a scheduling policy: which work runs together, and on which ranks."""

from __future__ import annotations

from dataclasses import dataclass

from core.failure import Failure
from core.graph.workflow import Node
from core.messages.worker import Load
from core.scheduling.node_cache import CacheJob
from core.scheduling.requests.bindings import ModelKeys, Needs
from core.scheduling.requests.request import Request


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Run these nodes in one batch on these ranks. They have one op and the same components."""

    items: tuple[tuple[Request, Node], ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Copy the inputs of a ready node that are only on other ranks to shared memory, for these ranks to read."""

    request: Request
    node: Node
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheDispatch:
    """Run the next piece of a job of the cache on this rank."""

    job: CacheJob
    token_budget: int  # most tokens of a divisible piece, which is never empty; an indivisible one ignores it
    rank: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End a request, because it is late or certain to be."""

    request: Request
    failure: Failure  # why, for the client


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Ask the policy again after so many seconds, although nothing may have come by then."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Loads:
    """What ranks are to load and drop now, and which waiting requests may begin."""

    loads: tuple[Load, ...] = ()
    startable: frozenset[ModelKeys] | None = None  # what these may need; None: anything that is there
    # When to decide again although no rank and no request has changed, monotonic seconds; None: not before they change.
    again: float | None = None


Copy = tuple[Needs, int]
"""(components, a rank that is to have them, too)"""

Decision = Dispatch | Fetch | CacheDispatch | GiveUp | AskAgain
