"""RankAdapters: the adapters that the ranks of an engine load while it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from core.failure import Failure
from core.messages.engine import AdapterAdded, Failed
from core.messages.worker import AdapterLoaded, DropAdapter, LoadAdapter

Tell = Callable[[int, LoadAdapter | DropAdapter], None]
"""(rank, message): sends it."""


@dataclass(slots=True)
class _Load:
    message: LoadAdapter
    waiting: set[int]  # ranks that have not answered
    patches: set[str] = field(default_factory=set)
    failure: Failure | None = None  # the first


class RankAdapters:
    """One per EngineCore. A load is answered when all ranks have; if one of them fails, no rank keeps the adapter."""

    def __init__(self, num_ranks: int, tell: Tell, configured: Iterable[tuple[str, str]]) -> None:
        """configured: (model, patch) of the adapters that were loaded at the start."""
        self._num_ranks, self._tell = num_ranks, tell
        self._in_use = set(configured)  # (model, patch); a file may be loaded again under another name
        self._loads: dict[str, _Load] = {}  # request id -> the load

    def load(self, message: LoadAdapter) -> None:
        """Have all ranks load an adapter; see `note`."""
        self._loads[message.request_id] = _Load(message, set(range(self._num_ranks)))
        self._tell_all(message)

    def drop(self, message: DropAdapter) -> None:
        """Have all ranks drop an adapter."""
        self._in_use.discard((message.model, message.patch))
        self._tell_all(message)

    def note(self, answer: AdapterLoaded) -> AdapterAdded | Failed | None:
        """Process a rank's answer; the answer to the load, if it was the last one."""
        load = self._loads[answer.request_id]
        load.waiting.remove(answer.rank)
        load.failure = load.failure or answer.failure
        load.patches |= {answer.patch} - {""}
        return None if load.waiting else self._end(answer.request_id)

    def _end(self, request_id: str) -> AdapterAdded | Failed:
        load = self._loads.pop(request_id)
        if load.failure is None and len(load.patches) > 1:
            load.failure = Failure("config", f"the workers have read different files at {load.message.path}; try again")
        model = load.message.model
        if load.failure is None:
            (patch,) = load.patches
            self._in_use.add((model, patch))
            return AdapterAdded(request_id=request_id, patch=patch)
        for patch in load.patches:
            if (model, patch) not in self._in_use:
                self._tell_all(DropAdapter(model, patch))
        return Failed(request_id=request_id, failure=load.failure)

    def _tell_all(self, message: LoadAdapter | DropAdapter) -> None:
        for rank in range(self._num_ranks):
            self._tell(rank, message)
