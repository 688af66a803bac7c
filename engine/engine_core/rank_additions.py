"""RankAdditions: the adapters and workflows that the ranks of an engine take in use while it serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from core.errors import RunError
from core.failure import Failure
from core.ipc.logs import of_request
from core.messages.engine import AdapterAdded, Failed, WorkflowAdded
from core.messages.worker import (
    AdapterLoaded,
    Addition,
    AdditionDone,
    DropAdapter,
    LoadAdapter,
    Removal,
    WorkflowLoaded,
)
from core.sampler_defaults import LEFT_OPEN, SamplerDefaults

logger = logging.getLogger("stencil.engine")

Tell = Callable[[int, Addition | Removal], None]
"""(rank, message): sends it."""

Answer = AdapterAdded | WorkflowAdded | Failed


@dataclass(slots=True)
class _Load:
    message: Addition
    waiting: set[int]  # ranks that have not answered
    made: set[Removal] = field(default_factory=set)  # what ranks have taken in use, as what undoes it
    dropped: set[Removal] = field(default_factory=set)  # of it, what ranks have been told to drop meanwhile
    failure: Failure | None = None  # the first
    defaults: SamplerDefaults = LEFT_OPEN  # that an adapter brings, as the last rank says

    def note(self, answer: AdditionDone) -> None:
        self.waiting.remove(answer.rank)
        self.failure = self.failure or answer.failure
        if answer.failure is None:
            self.made.add(_undoing(self.message, answer))
        if isinstance(answer, AdapterLoaded):
            self.defaults = answer.defaults

    def note_drop(self, removal: Removal) -> None:
        """Note that all ranks drop something, once they have done this."""
        message = self.message
        known = DropAdapter(message.model, message.patch) if isinstance(message, LoadAdapter) else message.removal
        if removal == known or removal in self.made:
            self.dropped.add(removal)

    def lose(self, rank: int, why: str) -> None:
        """Note that a rank's worker has died before it has answered."""
        self.waiting.remove(rank)
        if isinstance(self.message, LoadAdapter):
            failure = Failure("engine_dead", f"worker {rank} died while it loaded the adapter; try again")
        else:  # its import may be to blame: nothing of a user's text limits what it does to its worker
            failure = Failure.of(RunError(f"worker {rank} ended while it imported the workflow's classes: {why}"))
        self.failure = self.failure or failure


class RankAdditions:
    """One per EngineCore. A load is answered when all ranks that are up have answered; if one of them fails or dies, no
    rank keeps it. A rank whose worker was restarted takes in use what the others have."""

    def __init__(self, num_ranks: int, tell: Tell, configured: Iterable[tuple[str, str]]) -> None:
        """configured: (model, patch) of the adapters that every worker loads at its start."""
        self._up, self._tell = set(range(num_ranks)), tell
        # A file may be loaded again under another name.
        self._configured: set[Removal] = {DropAdapter(model, patch) for model, patch in configured}
        self._made: dict[Removal, Addition] = {}  # what undoes it -> how to make it again
        self._loads: dict[str, _Load] = {}  # request id -> the load
        self._awaited: list[set[str]] = [set() for _ in range(num_ranks)]  # by rank: of adapters, not answered

    def load(self, message: Addition) -> None:
        """Have all ranks take something in use, see `note`; while none is up, the first one that joins."""
        self._loads[message.request_id] = _Load(message, set(self._up))
        for rank in sorted(self._up):
            self._add(rank, message)

    def is_loading(self, rank: int) -> bool:
        """Whether a rank has still to answer for an adapter, for which its batches may wait."""
        return bool(self._awaited[rank])

    def drop(self, message: Removal) -> None:
        """Have all ranks drop something, also what they still load."""
        self._made.pop(message, None)
        self._configured.discard(message)
        for load in self._loads.values():
            load.note_drop(message)
        self._tell_all(message)

    def note(self, answer: AdditionDone) -> Answer | None:
        """Process a rank's answer; the answer to the load, if it was the last one."""
        self._awaited[answer.rank].discard(answer.request_id)
        load = self._loads.get(answer.request_id)
        if load is None:  # of a rank that has joined
            if answer.failure is not None:
                text = "worker %d: requests with %s will fail: %s"
                what = "an adapter" if isinstance(answer, AdapterLoaded) else "a workflow"
                logger.error(text, answer.rank, what, answer.failure.message, extra=of_request(""))
            return None
        load.note(answer)
        return self._end_if_over(answer.request_id)

    def lose(self, rank: int, why: str) -> list[Answer]:
        """Note that a rank's worker has died; answers to the loads that waited for nothing else."""
        self._up.remove(rank)
        self._awaited[rank].clear()
        waited = [request_id for request_id, load in self._loads.items() if rank in load.waiting]
        for request_id in waited:
            self._loads[request_id].lose(rank, why)
        return [answer for answer in map(self._end_if_over, waited) if answer is not None]

    def join(self, rank: int) -> None:
        """Have a rank whose worker was restarted take everything in use, before it is sent any plan."""
        self._up.add(rank)
        for message in self._made.values():
            self._add(rank, message)
        for load in self._loads.values():
            if load.failure is None:  # else no rank keeps it, and it may be what has ended this one
                load.waiting.add(rank)
                self._add(rank, load.message)
                for removal in load.dropped:
                    self._tell(rank, removal)

    def _end_if_over(self, request_id: str) -> Answer | None:
        return None if self._loads[request_id].waiting else self._end(self._loads.pop(request_id))

    def _end(self, load: _Load) -> Answer:
        message = load.message
        if load.failure is None and len(load.made) > 1:
            assert isinstance(message, LoadAdapter), "a workflow is the same everywhere"
            load.failure = Failure("config", f"the workers have read different files at {message.path}; try again")
        if load.failure is not None:
            for removal in load.made - load.dropped - self._configured - self._made.keys():
                self._tell_all(removal)
            return Failed(request_id=message.request_id, failure=load.failure)
        (removal,) = load.made
        if removal not in load.dropped:
            self._made[removal] = _again(message, removal)
        if not isinstance(removal, DropAdapter):
            return WorkflowAdded(message.request_id, removal.name)
        return AdapterAdded(message.request_id, removal.patch, load.defaults)

    def _add(self, rank: int, message: Addition) -> None:
        if isinstance(message, LoadAdapter):
            self._awaited[rank].add(message.request_id)
        self._tell(rank, message)

    def _tell_all(self, message: Removal) -> None:
        for rank in sorted(self._up):
            self._tell(rank, message)


def _again(message: Addition, removal: Removal) -> Addition:
    """How to make again what a message has made, and this undoes."""
    return msgspec.structs.replace(message, patch=removal.patch) if isinstance(removal, DropAdapter) else message


def _undoing(message: Addition, answer: AdditionDone) -> Removal:
    """What undoes what a rank has made of a message."""
    if isinstance(message, LoadAdapter):
        assert isinstance(answer, AdapterLoaded), "each kind of load has its answer"
        return DropAdapter(message.model, answer.patch)
    assert isinstance(answer, WorkflowLoaded), "each kind of load has its answer"
    return message.removal
