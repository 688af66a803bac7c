"""Outside: what the other processes of a simulated server do for its requests, and what that costs: Surroundings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf

import msgspec

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.cores import Cores
from benchmarks.simulation.engine import SimulatedEngine
from core.costs.prediction_margin import WINDOW, UsualDelay
from core.messages.engine import EngineRequest, Finished, Output, PartialImage
from engine.client.admission.admission_ticket import MOST_DELAY


@dataclass(frozen=True)
class Crowding:
    """What it costs that all ranks have work."""

    steps: float  # what a step takes, with the pause after it, as a multiple of what it takes alone
    wait: float  # seconds by which preparing a new request takes longer


@dataclass(frozen=True)
class Surroundings:
    """What a request costs beside its batches, in seconds; measured with requests that have the server alone."""

    prepare: float  # from when it is sent until the engine has it
    deliver: float  # from the end of its last batch until its sender has the picture
    trip: float  # from the end of a batch until its rank begins the next one, if that was not sent before
    pause: float  # the same, if it was
    outside_cpu: float  # CPU time of all processes but the workers
    send: float = 0.0  # from when it is due until it is sent
    arrive: float = 0.0  # of `prepare`: until the server counts the time that it has
    hand_over: float = 0.0  # of `deliver`: what the server does not know of
    crowding: Crowding | None = None  # None: it is estimated from `outside_cpu`


class Outside:
    """What other processes do for requests: they prepare them for the engine, what is due first first, and before that
    they deliver its pictures (`engine.images.image_jobs`). Requests that have no time left are aborted.
    """

    def __init__(
        self, clock: Clock, cores: Cores, around: Mapping[str, Surroundings], deliver: float, num_ranks: int
    ) -> None:
        """around: by request id; of others, such as warm-ups, pictures are delivered at once. deliver: seconds that it
        has taken so far.
        """
        self.ends: dict[str, float] = {}
        """Request id -> when its sender had the picture."""
        self._clock, self._cores, self._around, self._num_ranks = clock, cores, around, num_ranks
        self._delay = UsualDelay()
        self._running = set[str]()
        self._until: dict[str, float] = {}  # request id -> when its time is over
        for _ in range(WINDOW):
            self._delay.observe(0.0, deliver, clock.now)

    def prepare(self, request: EngineRequest, due: float, engine: SimulatedEngine) -> None:
        """Prepare a request that is sent now, and give it to the engine. due: when it was to be sent."""
        name, sent = request.request_id, self._clock.now
        beside = self._around[name]
        timeout = inf if request.deadline is None else request.deadline - request.arrival

        def add() -> None:
            # In bursts both take as many times as long: the server reads what comes one after the other.
            slowness = (self._clock.now - sent) / beside.prepare if beside.prepare else 1.0
            end = self._until[name] = sent + slowness * beside.arrive + timeout
            if end <= self._clock.now:
                return
            deadline = None if end == inf else end - self._reserve(beside, timeout)
            self._running.add(name)
            engine.add(msgspec.structs.replace(request, arrival=self._clock.now, deadline=deadline))
            if end < inf:
                self._clock.at(end, partial(self._abort, name, engine))

        are_busy = engine.clocks.num_busy(sent) == self._num_ranks
        self._cores.run(self._crowded(beside) if are_busy else beside.prepare, add, due + timeout)

    def _reserve(self, beside: Surroundings, timeout: float) -> float:
        """Seconds that are left for delivery: `engine.client.admission.admission_ticket` leaves as many, as
        to edits that were delivered in time.
        """
        return min(MOST_DELAY * timeout, max(0.0, self._delay.seconds(self._clock.now) - beside.hand_over))

    def _crowded(self, beside: Surroundings) -> float:
        """Processor time of preparing a request while all ranks have work: so much that, on an even share of the cores,
        it takes as long as was measured. It is more than alone, as other processes have used the cores' caches.
        """
        if beside.crowding is None:
            return beside.prepare
        seconds = (beside.prepare + beside.crowding.wait) / self._cores.slowness_of(self._num_ranks + 1)
        return max(beside.prepare, seconds)

    def _abort(self, name: str, engine: SimulatedEngine) -> None:
        if name in self._running:
            engine.scheduler.abort([name])
            engine.step()

    def note(self, outputs: tuple[Output, ...]) -> None:
        """Deliver what the engine has made."""
        for output in outputs:
            if not isinstance(output, PartialImage):
                self._running.discard(output.request_id)
            if isinstance(output, Finished):
                beside = self._around.get(output.request_id)
                seconds = 0.0 if beside is None else beside.deliver
                self._cores.run(seconds, partial(self._end, output.request_id, self._clock.now), -inf)

    def _end(self, request_id: str, made: float) -> None:
        """made: when the engine had made its picture."""
        self.ends[request_id] = self._clock.now
        if self._clock.now <= self._until.get(request_id, -inf):
            self._delay.observe(0.0, self._clock.now - made, self._clock.now)
