"""Decisions of a scheduling policy: which work runs together, on which ranks."""

from __future__ import annotations

from dataclasses import dataclass

from core.cache.priming import Chunk, PrimingJob
from core.graph.workflow import Node
from core.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Run these nodes together: one op of one model, on these ranks."""

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
    """Run work of the activation cache on this rank: the next chunk of a job, or the encoding of its template."""

    job: PrimingJob
    chunk: Chunk | None  # None: encode the template
    rank: int


Decision = Dispatch | Fetch | CacheDispatch
