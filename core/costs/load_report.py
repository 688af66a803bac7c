"""LoadReport and EngineStats: what an engine reports to its router, and its statistics for monitoring.

A report is sent when its content changes (a request came, began or ended; pages came or went), not at every step: in
between, the router estimates how far the steps have come. It contains the running requests and what has changed since
the last report, so that it does not grow with the number of waiting ones; the router keeps a copy of the queue
(`core/routing/engine_queue.py`). All times are seconds, predicted by the engine's cost model unless a name says
otherwise. `moved` is what messages need of the types with times of a clock, see `core.messages.engine_birth`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

import msgspec

from core.handles import LoadedComponent, RankIds, Tier


class RequestLoad(msgspec.Struct, frozen=True, array_like=True):
    """The remaining work of one image."""

    steps_left: int
    step_seconds: float  # added to a step of its batch, the mean over its steps left
    other_seconds: float  # encoding, decoding and all else that is done for it alone
    priority: int = 0  # lower goes first
    is_running: bool = False  # it keeps its slot; new requests cannot overtake it
    arrival: float = 0.0  # monotonic seconds
    owner: str = ""  # see EngineRequest
    degree: int = 1  # ranks that are useful to its steps, of which `step_seconds` is
    ranks: RankIds = ()  # of a running one: those that made its last steps; (): none has yet

    @property
    def seconds(self) -> float:
        """All of its work, without the constant part of its steps."""
        return self.steps_left * self.step_seconds + self.other_seconds

    def moved(self, seconds: float) -> Self:
        """The same with a time that is so many seconds later."""
        return msgspec.structs.replace(self, arrival=self.arrival + seconds)


class Queued(msgspec.Struct, frozen=True, array_like=True, tag="queued"):
    """An edit has joined the queue. Its load stays as it is until it begins."""

    request_id: str
    load: RequestLoad
    due: float  # see counts_as_due in core.scheduling.requests.fair_queue

    def moved(self, seconds: float) -> Self:
        """The same with times that are so many seconds later."""
        return msgspec.structs.replace(self, load=self.load.moved(seconds), due=self.due + seconds)


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """A worker was given an edit for the first time."""

    request_id: str
    seconds: float  # charged to its owner


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A waiting edit has ended, but a worker may still read its pages: it keeps its place in the queue without load."""

    request_id: str


class Dequeued(msgspec.Struct, frozen=True, array_like=True, tag="dequeued"):
    """An edit has left the queue."""

    request_id: str
    charged_seconds: float | None = None  # what its owner stays charged; None: as predicted when it began


QueueChange = Queued | Begun | Ended | Dequeued
"""What can happen to an engine's queue of edits. Applied in order to a copy of the queue, they keep it equal."""


class ResidentPages(msgspec.Struct, frozen=True, array_like=True):
    """How many of a template's keyframes an engine has in memory. Files are not counted: several engines write them."""

    template: str  # PageScheme.template_key of its content
    num_ready: int  # on the tier that computes
    num_below: int  # only on a slower tier in memory


class CostLine(msgspec.Struct, frozen=True, array_like=True):
    """The fitted line of one op of a served model: how long its batches take."""

    model: str  # name
    op: str  # name of the line, see Op
    coefficients: tuple[float, ...]  # of core.costs.cost_model.FEATURES
    degree: int = 1  # ranks that share the work
    controlnets: tuple[str, ...] = ()  # names of the model's that do the work, in alphabetical order


class CopyLine(msgspec.Struct, frozen=True, array_like=True):
    """The fitted line of copies of pages from `source` to the next faster tier."""

    source: Tier
    coefficients: tuple[float, ...]  # of core.costs.cost_model.COPY_FEATURES


class EngineCosts(msgspec.Struct, frozen=True):
    """The current state of an engine's cost model."""

    lines: tuple[CostLine, ...]
    copies: tuple[CopyLine, ...]


ModelState = Literal["loaded", "loading", "failed", "quarantined", "unloaded"]
"""The state of a model's weights. loaded: a rank, or all of a set that loads as one, has them. failed: some could not
be loaded when they were asked for last. quarantined: their batches have ended ranks, and they are refused to everybody.
unloaded: they are loaded when a request needs them."""


WeightsKind = Literal["model", "segmenter", "controlnet", "class"]
"""Whose weights: of a model; of a model's segmenter, or one of its ControlNets, which only requests need that use them
and which the model's own do not include; or of a user's class."""


class ModelLoad(msgspec.Struct, frozen=True, array_like=True):
    """How far an engine is with weights that requests need."""

    name: str  # of the model or the class
    kind: WeightsKind
    state: ModelState  # loading: or about to be, because a request waits for them
    # loaded: 0. loading: until they are loaded. Else: what loading them adds to LoadReport.load_seconds; above 0.
    seconds: float
    controlnet: str = ""  # its name, if they are of one
    ranks: RankIds = ()  # that can make steps with them; (): all can, or none
    nbytes: int = 0  # that loading them adds; 0: they are loaded, loading, or have no limit


class SpareBytes(msgspec.Struct, frozen=True, array_like=True):
    """Memory for further weights, on that set of an engine's ranks which has most of it, in bytes."""

    free: int  # that holds nothing
    idle: int  # that holds nothing, or weights that no request of the engine needs
    used: float = 0.0  # when those of them were used that are dropped first, monotonic seconds; 0: never, or none are

    def moved(self, seconds: float) -> Self:
        """The same with a time, if it has one, that is so many seconds later."""
        return msgspec.structs.replace(self, used=_moved(self.used, seconds))


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """How busy an engine is. Made by its Reporter."""

    # What it holds now.
    num_received: int  # edits and template requests since start; anything sent later is not in this report
    num_running: int  # edits
    num_waiting: int  # edits
    num_ranks: int = 1  # live workers; while there are none, nothing runs
    lanes: RankIds = (0,)  # those of them on which requests make steps beside each other
    running: dict[str, RequestLoad] = {}  # id -> remaining work of each edit that has begun and not ended
    # Predicted seconds.
    base_seconds: float = 0.0  # the constant part of a step, whichever requests are in it; 0 without requests
    priming_seconds: float = 0.0  # priming left
    drain_seconds: float = 0.0  # until all that it holds is done
    # Changes since the last report. Of an engine's first one: since its start, when it held nothing.
    is_first: bool = False
    queue: tuple[QueueChange, ...] = ()  # in the order in which they happened
    resident_pages: tuple[ResidentPages, ...] = ()  # templates with pages that have come or gone
    models: tuple[ModelLoad, ...] = ()  # weights of which more has changed than the time left
    room: SpareBytes | None = None  # None: weights have no limit
    load_seconds: float | None = None  # until what requests wait for is loaded; None: when the last report said
    costs: EngineCosts | None = None  # None: unchanged, or not due yet
    refused: dict[str, float] = {}  # model -> until when it is refused to everybody, monotonic seconds

    @property
    def begun(self) -> Iterator[str]:
        """Ids of the edits that a worker was given for the first time since the last report."""
        return (change.request_id for change in self.queue if isinstance(change, Begun))

    def moved(self, seconds: float) -> Self:
        """The same with times that are so many seconds later."""
        return msgspec.structs.replace(
            self,
            running={request_id: load.moved(seconds) for request_id, load in self.running.items()},
            queue=tuple(change.moved(seconds) if isinstance(change, Queued) else change for change in self.queue),
            refused={model: until + seconds for model, until in self.refused.items()},
            room=None if self.room is None else self.room.moved(seconds),
        )


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the activation cache, in entries (a template's pages at one noise level, or its clean latents). Made by
    CacheTally. Dictionaries are by tier.
    """

    # Since start: entries asked for.
    hits: dict[str, int]  # by the tier they were on
    misses: int  # on no tier
    primed: int  # computed
    # Since start: moves between tiers.
    evictions: dict[str, int]  # by the tier that they left
    loads: dict[str, int]  # copies to a faster tier, by the tier that was read
    failed_loads: int  # copies that found no file, or a damaged or foreign one
    failed_stores: int  # copies that a slower tier did not take, for example because the disk was full
    # Now.
    entries: dict[str, int]
    used_bytes: dict[str, int]  # never above budget_bytes
    budget_bytes: dict[str, int]
    # Since start.
    load_seconds: float  # time that loads took


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """One denoising step, measured and predicted."""

    num_requests: int  # images in its batch
    num_tokens: int  # computed
    seconds: float  # measured, of the worker
    predicted_seconds: float
    bound_seconds: float  # the part of the prediction that grows with the tokens, which batching cannot save
    started: float = 0.0  # monotonic seconds
    request_ids: tuple[str, ...] = ()  # one per image
    degree: int = 1  # ranks that computed it together

    def moved(self, seconds: float) -> Self:
        """The same with a time that is so many seconds later."""
        return msgspec.structs.replace(self, started=self.started + seconds)


RankModelState = Literal["resident", "loading", "quarantined"]
"""The state of a model on a rank. quarantined: its batches have ended ranks, or this rank could not load it."""


class RankModel(msgspec.Struct, frozen=True, array_like=True):
    """A served model on a rank, without adapters; one that the rank neither has nor tried to load is left out."""

    model: str  # name
    state: RankModelState
    hits: int  # loops of steps that requests have begun there, by this name, since it was loaded; lost ones begin again
    loads: int  # since the engine's start
    nbytes: int  # of its components that the rank has, shared ones too
    used: float  # when a step with it was last sent there, monotonic seconds; 0: none was

    def moved(self, seconds: float) -> Self:
        """The same with a time, if it has one, that is so many seconds later."""
        return msgspec.structs.replace(self, used=_moved(self.used, seconds))


class RankStats(msgspec.Struct, frozen=True):
    """Statistics of one rank of an engine."""

    resident_models: tuple[LoadedComponent, ...]  # as its worker has said
    busy_seconds: float  # since start: worker time
    deaths: int = 0  # since start: of its worker, which was restarted each time
    is_up: bool = True  # its worker lives and accepts plans
    models: tuple[RankModel, ...] = ()

    def moved(self, seconds: float) -> Self:
        """The same with times that are so many seconds later."""
        return msgspec.structs.replace(self, models=tuple(model.moved(seconds) for model in self.models))


QuarantineCause = Literal["load", "deaths", "owner_deaths"]
"""Why a model is refused. load: it could not be loaded. deaths: its batches ended ranks. owner_deaths: those of one
owner did, whose requests alone are refused."""


class QuarantinedModel(msgspec.Struct, frozen=True, array_like=True):
    """A model, ControlNets of one, or a user's class, which an engine refuses for a while, or that has not run since.
    Times are monotonic seconds.
    """

    model: str  # name of it or of the class
    cause: QuarantineCause
    times: int  # number of this refusal, from 1
    since: float
    until: float  # when it is tried again
    controlnets: tuple[str, ...] = ()  # names of those that are refused where they steer a step together; (): the model

    def moved(self, seconds: float) -> Self:
        """The same with times that are so many seconds later."""
        return msgspec.structs.replace(self, since=self.since + seconds, until=self.until + seconds)


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of an engine, made by its Reporter."""

    # Now.
    op_seconds: dict[str, float]  # op -> predicted work left
    ranks: tuple[RankStats, ...]
    models: dict[str, ModelState] = {}  # name -> state, without adapters
    quarantine: tuple[QuarantinedModel, ...] = ()
    r_squared: dict[str, float]  # op -> quality of its predictions, 1 = exact; of the worst model
    # Since start.
    steps: int
    mixed_steps: int = 0  # that requests of several served models shared
    batch_tokens: int  # tokens computed, summed over steps
    batch_requests: int  # images in the batch, summed over steps
    tokens_skipped: int  # image tokens that mask-aware execution left out
    steps_repeated: int = 0  # steps of images that were lost with a worker and done again
    prime_chunks: int
    busy_seconds: dict[str, float]  # op -> worker time, of all ranks
    model_hits: dict[str, int] = {}  # model, without adapters -> loops of steps that requests have begun with it
    model_loads: dict[str, int] = {}  # the same -> how often ranks have loaded it
    # Since the last message.
    recent_steps: tuple[StepSample, ...] = ()  # without steps that were done in parts, which have no prediction
    # Since start and now.
    cache: CacheStats | None = None  # None without mask-aware execution

    @property
    def resident_models(self) -> tuple[LoadedComponent, ...]:
        """Components that any rank has loaded."""
        return tuple(dict.fromkeys(loaded for rank in self.ranks for loaded in rank.resident_models))

    def moved(self, seconds: float) -> Self:
        """The same with times that are so many seconds later."""
        return msgspec.structs.replace(
            self,
            ranks=tuple(rank.moved(seconds) for rank in self.ranks),
            recent_steps=tuple(sample.moved(seconds) for sample in self.recent_steps),
            quarantine=tuple(each.moved(seconds) for each in self.quarantine),
        )


def _moved(time: float, seconds: float) -> float:
    """A time of something, or 0 if it never was, so many seconds later."""
    return time + seconds if time else time
