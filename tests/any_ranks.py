"""A policy for any workflow on any ranks, requests for it, and what their nodes answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random

import msgspec
from fakes import make_edit, with_spec
from workflows import TOY, Toy

from core.graph.op import OPS
from core.graph.workflow import Node, Workflow
from core.messages.engine import EngineRequest
from core.messages.worker import Item
from core.scheduling.dispatch import Decision, Dispatch, Fetch
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.requests.request import Request
from core.scheduling.view import View


@contextmanager
def toy_op() -> Iterator[None]:
    """While the op TOY is registered."""
    OPS.register(TOY)
    try:
        yield
    finally:
        OPS.unregister(TOY.name)


class AnyRanks(SchedulingPolicy):
    """Runs every ready node as soon as it can, together with others, on ranks drawn at random."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        fetches: list[Decision] = []
        batches: dict[tuple[str, tuple[int, ...]], list[tuple[Request, Node]]] = {}
        for request in list(view.requests.live()):
            ready = view.ready(request)
            for node in self._random.sample(ready, len(ready)):
                ranks = self._ranks(view)
                if view.can_run(request, node, ranks):
                    batches.setdefault((node.op, ranks), []).append((request, node))
                elif view.can_fetch(request, node, ranks):
                    fetches.append(Fetch(request, node, ranks))
        dispatches = [Dispatch(tuple(items), ranks) for (_, ranks), items in batches.items()]
        self._random.shuffle(dispatches)
        return [*fetches, *dispatches]

    def _ranks(self, view: View) -> tuple[int, ...]:
        count = self._random.choice([1, 1, 1, 2, len(view.ranks)])
        return tuple(sorted(self._random.sample(view.ranks, min(count, len(view.ranks)))))


def in_workflow(name: str, workflow: Workflow, rounds: Sequence[int], previews: int = 0) -> EngineRequest:
    """A request for a workflow; its name is a number."""
    edit = make_edit(name, steps=max([2, *rounds]), partial_images=previews)
    sampling = msgspec.structs.replace(edit.spec.sampling, seed=int(name))
    edit = with_spec(edit, sampling=sampling)
    return msgspec.structs.replace(edit, workflow=workflow.name, rounds=tuple(rounds))


def answer_of(item: Item) -> dict[str, object]:
    """What nodes that choose say: the same for the same request."""
    return item.work.answer if isinstance(item.work, Toy) else {}
