"""RankAdapters: the adapters that the ranks of an engine load while it serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from core.failure import Failure
from core.ipc.logs import of_request
from core.messages.engine import AdapterAdded, Failed
from core.messages.worker import AdapterLoaded, DropAdapter, LoadAdapter
from core.sampler_defaults import LEFT_OPEN, SamplerDefaults

logger = logging.getLogger("stencil.engine")

Tell = Callable[[int, LoadAdapter | DropAdapter], None]
"""(rank, message): sends it."""

Answer = AdapterAdded | Failed


@dataclass(slots=True)
class _Load:
    message: LoadAdapter
    waiting: set[int]  # ranks that have not answered
    patches: set[str] = field(default_factory=set)
    failure: Failure | None = None  # the first
    defaults: SamplerDefaults = LEFT_OPEN  # that it brings, as the last rank says


class RankAdapters:
    """One per EngineCore. A load is answered when all ranks that are up have answered; if one of them fails or dies, no
    rank keeps the adapter. A rank whose worker was restarted loads what the others have."""

    def __init__(self, num_ranks: int, tell: Tell, configured: Iterable[tuple[str, str]]) -> None:
        """configured: (model, patch) of the adapters that every worker loads at its start."""
        self._up, self._tell = set(range(num_ranks)), tell
        self._configured = set(configured)  # a file may be loaded again under another name
        self._loaded: dict[tuple[str, str], LoadAdapter] = {}  # (model, patch) -> how to load it again
        self._loads: dict[str, _Load] = {}  # request id -> the load

    def load(self, message: LoadAdapter) -> None:
        """Have all ranks load an adapter, see `note`; while none is up, the first one that joins."""
        self._loads[message.request_id] = _Load(message, set(self._up))
        self._tell_all(message)

    def drop(self, message: DropAdapter) -> None:
        """Have all ranks drop an adapter."""
        self._loaded.pop((message.model, message.patch), None)
        self._configured.discard((message.model, message.patch))
        self._tell_all(message)

    def note(self, answer: AdapterLoaded) -> Answer | None:
        """Process a rank's answer; the answer to the load, if it was the last one."""
        load = self._loads.get(answer.request_id)
        if load is None:  # of a rank that has joined
            if answer.failure is not None:
                text = "worker %d: requests with an adapter will fail: %s"
                logger.error(text, answer.rank, answer.failure.message, extra=of_request(""))
            return None
        load.waiting.remove(answer.rank)
        load.failure = load.failure or answer.failure
        load.patches |= {answer.patch} - {""}
        load.defaults = answer.defaults
        return self._end_if_over(answer.request_id)

    def lose(self, rank: int) -> list[Answer]:
        """Note that a rank's worker has died; answers to the loads that waited for nothing else."""
        self._up.remove(rank)
        failure = Failure("engine_dead", f"worker {rank} died while it loaded the adapter; try again")
        waited = [request_id for request_id, load in self._loads.items() if rank in load.waiting]
        answers = [self.note(AdapterLoaded(rank, request_id, failure=failure)) for request_id in waited]
        return [answer for answer in answers if answer is not None]

    def join(self, rank: int) -> None:
        """Have a rank whose worker was restarted load all adapters, before it is sent any plan."""
        self._up.add(rank)
        for message in self._loaded.values():
            self._tell(rank, message)
        for load in self._loads.values():
            load.waiting.add(rank)
            self._tell(rank, load.message)

    def _end_if_over(self, request_id: str) -> Answer | None:
        return None if self._loads[request_id].waiting else self._end(self._loads.pop(request_id))

    def _end(self, load: _Load) -> Answer:
        message = load.message
        if load.failure is None and len(load.patches) > 1:
            load.failure = Failure("config", f"the workers have read different files at {message.path}; try again")
        if load.failure is None:
            (patch,) = load.patches
            self._loaded[message.model, patch] = msgspec.structs.replace(message, patch=patch)
            return AdapterAdded(message.request_id, patch, load.defaults)
        for patch in load.patches:
            if (message.model, patch) not in self._configured | self._loaded.keys():
                self._tell_all(DropAdapter(message.model, patch))
        return Failed(request_id=message.request_id, failure=load.failure)

    def _tell_all(self, message: LoadAdapter | DropAdapter) -> None:
        for rank in sorted(self._up):
            self._tell(rank, message)
