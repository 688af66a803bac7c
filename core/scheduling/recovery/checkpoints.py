"""Checkpoints: keeps the state of running requests in the engine's arena, where no worker's death can take it. A
checkpoint is made every few rounds, and after the last round of a loop that another loop follows. After a death a
request repeats only the rounds since its last checkpoint.

A checkpoint consists of ordinary values (`core.scheduling.values.values`) that are *pinned*: moved to shared memory,
and not freed when their last reader is done. It replaces the checkpoint before it once all of its values are written.
A checkpoint that finds no room until the next one is due is left out: a death then costs more rounds, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import ceil, sqrt

from core.graph.workflow import Node
from core.handles import TensorKey
from core.messages.worker import Transfer
from core.scheduling.requests.request import Checkpoint, Request
from core.scheduling.values.values import Value, ValueTable

DEATH_SECONDS = 3600.0
"""Assumed time between two deaths of a worker. Short, because the worker itself causes most of them: lack of memory, a
driver, a bug.
"""

MAX_ROUNDS = 8
"""Most rounds between two checkpoints, unless their cost would exceed MAX_SHARE."""

MAX_SHARE = 0.005
"""Largest share of the time of rounds that their checkpoints may take."""

COPY_SECONDS, BYTES_PER_SECOND = 150e-6, 2e9
"""Time of writing one value to shared memory: a constant (a plan's order and a message back), and the speed of copying
its bytes.
"""

MAX_ARENA_SHARE = 0.5
"""Largest share of the arena that may be taken after a checkpoint is written. The rest is left to values that ranks
wait for.
"""


def rounds_between(num_values: int, num_bytes: int, round_seconds: float) -> int:
    """Rounds from one checkpoint to the next. round_seconds: this request's share of the time of a round.

    The optimum for time lost to copies and to repeated rounds (Young, "A first order approximation to the optimum
    checkpoint interval", 1974) is sqrt(2 * time of a copy * time between deaths). It is long, so MAX_ROUNDS bounds what
    one death costs, and MAX_SHARE what all copies cost.
    """
    seconds = num_values * COPY_SECONDS + num_bytes / BYTES_PER_SECOND
    optimum = sqrt(2 * seconds * DEATH_SECONDS) / round_seconds
    least = seconds / (MAX_SHARE * round_seconds)
    return max(1, ceil(least), min(MAX_ROUNDS, round(optimum)))


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints of one scheduler's requests."""

    values: ValueTable
    _wanted: dict[str, Request] = field(default_factory=dict)  # id -> request with values to be moved

    def note_round(self, request: Request, node: Node, seconds: float) -> None:
        """Note that a node that repeats has done a round; begin a checkpoint if one is due. To be called after the
        values of the round are noted. seconds: the request's share of the batch's time.
        """
        region, done = node.region, request.progress.done[node.name]
        if self._is_due(request, region, done, seconds):
            self._begin(request, Checkpoint(region, done, self._state(request, region)))

    def _begin(self, request: Request, checkpoint: Checkpoint) -> None:
        mine = [each for each in request.unwritten if each.region == checkpoint.region]
        self.values.pin(checkpoint.keys)
        request.unwritten.append(checkpoint)
        self._give_up(request, [each for each in mine if self._missing(each)])
        request.saved_rounds[checkpoint.region] = checkpoint.round
        self._wanted[request.id] = request

    def _is_due(self, request: Request, region: str, done: int, seconds: float) -> bool:
        progress, since = request.progress, done - request.saved_rounds.get(region, 0)
        is_last = done == progress.rounds[region]
        if seconds <= 0.0 or (since < request.rounds_between.get(region, 1) and not is_last):
            return False
        if any(progress.done[node.name] != done for node in request.workflow.nodes_of(region)):
            return False  # other nodes of the region have yet to do this round
        if is_last:
            return region in request.workflow.followed
        return since >= self._update_interval(request, region, seconds)

    def _update_interval(self, request: Request, region: str, seconds: float) -> int:
        values = [self.values.get(key) for key in self._state(request, region)]
        sizes = [value.ref.nbytes for value in values if value is not None and value.handle is None]
        request.rounds_between[region] = rounds_between(len(sizes), sum(sizes), seconds)
        return request.rounds_between[region]

    def _state(self, request: Request, region: str) -> tuple[TensorKey, ...]:
        """Keys of the values that a region's rounds have made and that are still to be read: by its next round, by side
        nodes, or by nodes after its last round.
        """
        names = {node.name for node in request.workflow.nodes_of(region)}
        mine = [key for key in self.values.keys(request.id) if key.node in names]
        return tuple(key for key in mine if (value := self.values.get(key)) is not None and value.readers_left)

    def transfers(self, ranks: Collection[int]) -> list[Transfer]:
        """Orders to write the values of checkpoints that are not in shared memory. ranks: the ranks that may be given
        orders now. Values on other ranks, and those that find no room, are tried again at the next call.
        """
        found: list[Transfer] = []
        for request in list(self._wanted.values()):
            moved = [each for checkpoint in request.unwritten for each in self._move(checkpoint, ranks)]
            request.num_moving += len(moved)
            found += moved
            if not any(self._missing(checkpoint) for checkpoint in request.unwritten):
                del self._wanted[request.id]
            self.note_moved(request)
        return found

    def _move(self, checkpoint: Checkpoint, ranks: Collection[int]) -> list[Transfer]:
        missing = self._missing(checkpoint)
        if any(value.ranks.isdisjoint(ranks) for value in missing):
            return []
        leave = int((1.0 - MAX_ARENA_SHARE) * self.values.num_bytes)
        return self.values.move([value.ref.key for value in missing], frozenset(ranks), leave) or []

    def _missing(self, checkpoint: Checkpoint) -> list[Value]:
        """The values of a checkpoint that are neither in shared memory nor on their way there."""
        values = (self.values.get(key) for key in checkpoint.keys)
        return [value for value in values if value is not None and value.handle is None]

    def note_moved(self, request: Request) -> None:
        """Note that values of a request have been written. The last complete checkpoint of each region is kept, and
        those before it are given up.
        """
        for checkpoint in [each for each in request.unwritten if self._is_complete(each)]:
            region, round_ = checkpoint.region, checkpoint.round
            if checkpoint not in request.unwritten:
                continue  # it was given up, because a later one is complete
            older = [each for each in request.unwritten if each.region == region and each.round < round_]
            last = request.checkpoints.get(region)
            request.checkpoints[region] = checkpoint
            request.unwritten = [each for each in request.unwritten if each is not checkpoint and each not in older]
            self._unpin(request, older if last is None else [last, *older])

    def _is_complete(self, checkpoint: Checkpoint) -> bool:
        values = [self.values.get(key) for key in checkpoint.keys]
        return all(value is not None and value.exported is not None for value in values)

    def _unpin(self, request: Request, gone: Iterable[Checkpoint]) -> None:
        """Unpin the values that only these checkpoints need."""
        needed = {key for each in (*request.checkpoints.values(), *request.unwritten) for key in each.keys}
        self.values.unpin(key for each in gone for key in each.keys if key not in needed)

    def _give_up(self, request: Request, gone: Collection[Checkpoint]) -> None:
        request.checkpoints = {region: each for region, each in request.checkpoints.items() if each not in gone}
        request.unwritten = [each for each in request.unwritten if each not in gone]
        self._unpin(request, gone)

    def note_loss(self, request: Request) -> None:
        """Note that values of a request may be lost, or that it has gone back to an earlier round. Checkpoints that can
        never be complete are given up, and so are checkpoints of rounds that are to be repeated. Those exist if nodes
        after a loop began before all of the loop was done.
        """
        known = (*request.checkpoints.values(), *request.unwritten)
        self._give_up(request, [each for each in known if self._is_undone(request, each)])
        rounds = {each.region: each.round for each in (*request.checkpoints.values(), *request.unwritten)}
        request.saved_rounds = {region: rounds.get(region, 0) for region in request.saved_rounds}
        if request.unwritten:
            self._wanted[request.id] = request

    def _is_undone(self, request: Request, checkpoint: Checkpoint) -> bool:
        nodes, done = request.workflow.nodes_of(checkpoint.region), request.progress.done
        are_gone = any(self.values.get(key) is None for key in checkpoint.keys)
        return are_gone or any(done[node.name] < checkpoint.round for node in nodes)

    def drop(self, request: Request) -> None:
        """Give up all checkpoints of a request that restarts, because its steps may make other values then."""
        self._give_up(request, [*request.checkpoints.values(), *request.unwritten])
        request.saved_rounds.clear()
        self.forget(request.id)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless only values of checkpoints are pinned, and complete ones have all of theirs."""
        requests = list(requests)
        complete = [each for request in requests for each in request.checkpoints.values()]
        assert all(map(self._is_complete, complete)), "a checkpoint is incomplete"
        known = {key for each in complete for key in each.keys}
        known |= {key for request in requests for each in request.unwritten for key in each.keys}
        assert all(self.values.get(key) is not None for key in known), "a checkpoint can never be complete"
        assert self.values.pinned <= known, "values are kept for no checkpoint"
        assert self._wanted.keys() <= {request.id for request in requests}

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        self._wanted.pop(request_id, None)
