"""Messages from the API server to an EngineCore, and back.

In both processes their times are seconds of its own CLOCK_MONOTONIC; `moved` makes the engine's ages of them, which
travel, and back (`engine_birth.py`).
"""

from __future__ import annotations

from typing import Self, TypeVar

import msgspec

from core.costs.load_report import EngineStats, LoadReport
from core.failure import Failure
from core.handles import ArrayRef, CacheResult, Tier
from core.messages.message import Message
from core.messages.specs import Spec
from core.messages.specs.picture_spec import PictureSpec
from core.messages.worker import Addition, Removal
from core.model_info import ModelInfo
from core.patches import PatchSet
from core.sampler_defaults import LEFT_OPEN, SamplerDefaults


class TimedMessage(Message, frozen=True):
    """A message with times."""

    def moved(self, seconds: float) -> Self:
        """The same message with times that are so many seconds later."""
        raise NotImplementedError


class EngineRequest(TimedMessage, frozen=True):
    """One request to an engine: a head that all kinds of request have, and the spec. Sent by the API server."""

    request_id: str
    model: str  # name of a served model; "": of none, see RunSpec
    workflow: str  # name, see core.graph.catalog
    spec: Spec  # what it asks for
    rounds: tuple[int, ...]  # of each of the workflow's regions, at least 1
    # When and for whom.
    arrival: float
    priority: int = 0  # lower goes first
    deadline: float | None = None  # after it the result is useless
    objective: float | None = None  # when the worker must be done to meet the latency objective; None: it has none, or
    # was admitted although it will miss it
    owner: str = ""  # digest of its API key, "" = none; owners get equal shares of the engine
    num_deaths: int = 0  # of processes that died while they ran it; after some it runs alone
    call_id: str = ""  # of the call that is answered once all of its requests are done; "" = of this one alone
    trace_context: str = ""  # W3C traceparent of the parent of the engine's spans; "" = not traced

    @property
    def picture(self) -> PictureSpec:
        """Its spec, of a request for a picture or a mask."""
        assert isinstance(self.spec, PictureSpec), f"{self.request_id} asks for no picture"
        return self.spec

    def moved(self, seconds: float) -> Self:
        return msgspec.structs.replace(
            self,
            arrival=self.arrival + seconds,
            deadline=None if self.deadline is None else self.deadline + seconds,
            objective=None if self.objective is None else self.objective + seconds,
        )


class PrimeTemplate(TimedMessage, frozen=True):
    """Make a template's pages and keep them. The array is in the sender's arena and stays valid until the terminal
    message. Sent by the API server.
    """

    request_id: str
    model: str
    # From PreparedImages.
    template: ArrayRef
    width: int
    height: int
    content_id: str
    # Set by the sender.
    num_tokens: int  # image tokens of the template
    arrival: float
    is_idle_work: bool = False  # to be computed only when there is no other work
    cache_salt: str = ""  # see CacheConfig.salt
    patches: PatchSet = ()  # of the edits that the pages are for
    owner: str = ""  # see EngineRequest

    def moved(self, seconds: float) -> Self:
        return msgspec.structs.replace(self, arrival=self.arrival + seconds)


class DropTemplate(Message, frozen=True):
    """Drop a template's pages, with all patches, on every tier, disk included, once no edit uses them. It has no
    answer."""

    model: str
    content_id: str
    cache_salt: str = ""  # pages with other salts stay, see CacheConfig.salt


class UseAdapters(Message, frozen=True):
    """A request's late adapters are loaded: it has them from its next step on. Ignored for requests that have ended.
    Sent by the API server.
    """

    request_id: str
    patches: PatchSet


class Abort(Message, frozen=True):
    """Abort these requests. Each still gets its terminal message: Aborted, or another one if it has ended already."""

    request_ids: tuple[str, ...]


class Drain(Message, frozen=True):
    """Finish all accepted requests, then exit. New ones are refused by the sender, not here."""


ToEngine = EngineRequest | UseAdapters | PrimeTemplate | DropTemplate | Addition | Removal | Abort | Drain


class EngineReady(Message, frozen=True):
    """The engine has started and accepts requests."""

    models: tuple[ModelInfo, ...]
    device_page_bytes: int = 0  # device memory for pages; 0 if they are read from host memory


class PartialImage(Message, frozen=True):
    """`pixels[index]` of the request holds a preview of its clean image after `step` steps, of all of its loops."""

    request_id: str
    index: int
    step: int


class AdaptersUsed(Message, frozen=True):
    """From which step on a request has its late adapters. Sent before anything that this step or a later one makes."""

    request_id: str
    step: int


class Finished(TimedMessage, frozen=True):
    """Terminal. The last of the request's `pixels` holds the image."""

    request_id: str
    ms: dict[str, float]  # milliseconds by part, as in the API's `stencil.ms`
    text_tokens: int  # of the prompt
    prompt_truncated: bool
    cache: CacheResult
    tier: Tier | None  # the slowest tier that its pages came from; None unless a hit
    is_primed: bool  # pages were primed for it, by itself or by an earlier edit of its template
    full_blocks: int  # most blocks that one of its mask-aware steps computed in full
    made: float  # when the workers had finished it
    degrees: tuple[int, ...] = ()  # of each computed step, the number of ranks that computed it together
    steps_without_lora: int | None = None  # first steps without its late adapters; None: it had none that were late
    active_tokens: int | None = None  # of the mask that was found; None: none was asked for
    mask_score: float = 0.0  # how sure the segmenter was, 0..1
    # Of the results of users' classes, by name; their bytes are at their places.
    shapes: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)

    def moved(self, seconds: float) -> Self:
        return msgspec.structs.replace(self, made=self.made + seconds)


class TemplatePrimed(Message, frozen=True):
    """Terminal, for PrimeTemplate."""

    request_id: str
    nbytes: int  # of its pages and clean latents
    ms: float  # worker time spent on it


class AdapterAdded(Message, frozen=True):
    """Terminal, for LoadAdapter: every rank of the engine has it."""

    request_id: str
    patch: str  # its id
    defaults: SamplerDefaults = LEFT_OPEN  # that it brings


class WorkflowAdded(Message, frozen=True):
    """Terminal, for LoadWorkflow: every rank of the engine has imported its classes, and one has loaded them, unless
    --model-bytes limits what is loaded.
    """

    request_id: str
    name: str  # of the workflow


class Failed(Message, frozen=True):
    """Terminal."""

    request_id: str
    failure: Failure


class Aborted(Message, frozen=True):
    """Terminal."""

    request_id: str


Output = PartialImage | AdaptersUsed | Finished | TemplatePrimed | AdapterAdded | WorkflowAdded | Failed | Aborted
"""What an engine tells clients of a request, or of something that was added."""


class EngineOutputs(TimedMessage, frozen=True):
    """The outputs of one iteration of the engine, with its load."""

    outputs: tuple[Output, ...]
    load: LoadReport
    stats: EngineStats | None = None  # None if the last ones are recent enough

    def moved(self, seconds: float) -> Self:
        return msgspec.structs.replace(
            self,
            outputs=tuple(moved(output, seconds) for output in self.outputs),
            load=self.load.moved(seconds),
            stats=None if self.stats is None else self.stats.moved(seconds),
        )


class EngineAlive(Message, frozen=True):
    """Heartbeat: the engine's event loop is running. Sent regularly, from the start of its process to the end."""


class EngineFailed(TimedMessage, frozen=True):
    """The engine cannot continue, or could not start."""

    failure: Failure
    # Terminal messages of the requests it held; the receiver fails all others.
    outputs: tuple[Output, ...] = ()

    def moved(self, seconds: float) -> Self:
        return msgspec.structs.replace(self, outputs=tuple(moved(output, seconds) for output in self.outputs))


FromEngine = EngineReady | EngineOutputs | EngineAlive | EngineFailed


M = TypeVar("M", bound=Message)


def moved(message: M, seconds: float) -> M:
    """A message of this file with times, if it has any, that are so many seconds later."""
    return message.moved(seconds) if isinstance(message, TimedMessage) else message
