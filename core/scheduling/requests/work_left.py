"""WorkLeft: the work of one request that no rank has been sent yet, in predicted seconds."""

from __future__ import annotations

from typing import NamedTuple

from core.graph.work import Work
from core.graph.workflow import Node
from core.scheduling.requests.request import Request


class WorkLeft(NamedTuple):
    """Made by the Predictor."""

    steps: int
    tokens: float  # mean tokens that one of these steps computes, over all of its rows
    keys: float  # mean tokens that one of these steps attends to, over all of its rows
    step_seconds: float  # that each of these steps adds to its batch, the mean, on as many ranks as are useful
    before: float  # seconds of the nodes that run once, before the last steps
    after: float  # seconds of the nodes that read what rounds have made
    alone: float  # seconds of all of it on one rank, if no other request shares its batches


def steps_of(request: Request, node: Node) -> list[tuple[int, Work]]:
    """(number, work of one) of a node's remaining steps: first those that compute all tokens, then mask-aware ones."""
    times, spec = request.progress.times_left(node), request.spec
    if not times:
        return []
    if node.canvas or not spec.is_mask_aware:
        return [(times, request.work(node))]
    first = request.progress.scheduled[node.name]
    num_full = spec.num_full_steps(first, first + times)
    kinds = (num_full, False), (times - num_full, True)
    return [(number, request.work_of(node, is_masked=is_masked)) for number, is_masked in kinds if number]
