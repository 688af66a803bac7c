"""Messages from the API server to an EngineCore, and back."""

from __future__ import annotations

import msgspec

from core.costs.load_report import EngineStats, LoadReport
from core.failure import Failure
from core.handles import ArrayRef, CacheResult, Tier
from core.messages.message import Message
from core.messages.worker import DropAdapter, LoadAdapter
from core.model_info import ModelInfo
from core.patches import PatchSet
from core.sampling_params import SamplingParams


class Canvas(msgspec.Struct, frozen=True, kw_only=True):
    """A picture size that nodes of a workflow work at, and what an image processor has made at this size. Every array
    is in the sender's arena and stays valid until the request's terminal message.
    """

    # The picture, from PreparedImages.
    width: int  # px
    height: int  # px
    template: ArrayRef
    mask: ArrayRef
    active: ArrayRef
    # Sizes, from the model and the picture.
    num_tokens: int  # image tokens
    num_condition_tokens: int = 0  # condition tokens, which no mask-aware step computes
    max_text_tokens: int  # length to which the prompt is padded or cut
    extra_text_tokens: int = 0  # see `ModelInfo.text_tokens_beside`

    @property
    def num_text_tokens(self) -> int:
        """Text tokens of each row in the denoiser."""
        return self.max_text_tokens + self.extra_text_tokens

    @property
    def num_all_tokens(self) -> int:
        """Image, condition and text tokens: what a step's tokens attend to, and what a full step computes."""
        return self.num_tokens + self.num_condition_tokens + self.num_text_tokens

    @property
    def num_active_tokens(self) -> int:
        """Tokens that a mask-aware step computes: active image tokens and text tokens."""
        return self.active.size + self.num_text_tokens


class EditSpec(Canvas, frozen=True, kw_only=True, tag="edit"):
    """An image to make from a template and a mask. It is the canvas of the final picture itself."""

    # The user's wishes.
    prompt: str
    sampling: SamplingParams  # resolved, without a None that the model needs
    class_label: int | None = None  # instead of a prompt: the class to make a picture of, see `ModelInfo.num_classes`
    patches: PatchSet = ()  # adapters that change the model's layers
    # From PreparedImages.
    content_id: str
    # Memory for results.
    pixels: tuple[ArrayRef, ...]  # uint8 [height, width, 3], one per partial image and the final one last
    # Two passes, see workflow "hires": the smaller canvas of the first; None: one pass.
    first_pass: Canvas | None = None
    # Mask-aware execution, decided from the request and the server's flags alone.
    is_mask_aware: bool = False  # steps compute only the active tokens, over pages, except full ones
    cache_salt: str = ""  # see `CacheConfig.salt`

    @property
    def num_rows(self) -> int:
        """Rows of a step, see SamplingParams."""
        return self.sampling.num_rows

    @property
    def has_own_pages(self) -> bool:
        """Whether it is mask-aware over its own pages and not over its template's."""
        return self.is_mask_aware and bool(self.sampling.own_page_steps)

    @property
    def reads_template(self) -> bool:
        """Whether it is mask-aware over its template's pages."""
        return self.is_mask_aware and not self.sampling.own_page_steps

    def is_full_step(self, step: int) -> bool:
        """Whether a step of a mask-aware run computes all tokens."""
        sampling = self.sampling
        return step in sampling.own_page_steps if sampling.own_page_steps else step < (sampling.full_steps or 0)

    def num_full_steps(self, first: int, end: int) -> int:
        """How many of a mask-aware run's steps from `first` to before `end` compute all tokens."""
        if self.sampling.own_page_steps:
            return sum(first <= step < end for step in self.sampling.own_page_steps)
        return max(0, min(end, self.sampling.full_steps or 0) - first)

    def own_page_step(self, step: int) -> int | None:
        """The step whose pages a step reads, or makes if it is that step itself; None: it has no pages of its own."""
        if not self.has_own_pages:
            return None
        return max(full for full in self.sampling.own_page_steps or () if full <= step)

    @property
    def num_partial_images(self) -> int:
        return len(self.pixels) - 1

    def canvas(self, name: str) -> Canvas:
        """The canvas that a node of a workflow works at. Raises KeyError if the request has none of this name."""
        if not name:
            return self
        if name != "first" or self.first_pass is None:
            raise KeyError(f"the request has no canvas {name!r}")
        return self.first_pass


Spec = EditSpec
"""What a request asks for: one type per kind of request."""


class EngineRequest(Message, frozen=True):
    """One request to an engine: a head that all kinds of request have, and the spec. Sent by the API server."""

    request_id: str
    model: str  # name of a served model
    workflow: str  # name, see core.graph.catalog
    spec: Spec
    rounds: tuple[int, ...]  # of each of the workflow's regions, at least 1
    # When and for whom. Times are monotonic seconds.
    arrival: float
    priority: int = 0  # lower goes first
    deadline: float | None = None  # after it the result is useless
    objective: float | None = None  # when the worker must be done to meet the latency objective; None: it has none, or
    # was admitted although it will miss it
    owner: str = ""  # digest of its API key, "" = none; owners get equal shares of the engine
    num_deaths: int = 0  # of processes that died while they ran it; after some it runs alone
    trace_context: str = ""  # W3C traceparent of the parent of the engine's spans; "" = not traced


class PrimeTemplate(Message, frozen=True):
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
    arrival: float  # monotonic seconds
    is_idle_work: bool = False  # to be computed only when there is no other work
    cache_salt: str = ""  # see CacheConfig.salt
    patches: PatchSet = ()  # of the edits that the pages are for


class DropTemplate(Message, frozen=True):
    """Drop a template's pages, with all patches, on every tier, disk included, once no edit uses them. It has no
    answer."""

    model: str
    content_id: str
    cache_salt: str = ""  # pages with other salts stay, see CacheConfig.salt


class Abort(Message, frozen=True):
    """Abort these requests. Each still gets its terminal message: Aborted, or another one if it has ended already."""

    request_ids: tuple[str, ...]


class Drain(Message, frozen=True):
    """Finish all accepted requests, then exit. New ones are refused by the sender, not here."""


ToEngine = EngineRequest | PrimeTemplate | DropTemplate | LoadAdapter | DropAdapter | Abort | Drain


class EngineReady(Message, frozen=True):
    """The engine has started and accepts requests."""

    models: tuple[ModelInfo, ...]
    device_page_bytes: int = 0  # device memory for pages; 0 if they are read from host memory


class PartialImage(Message, frozen=True):
    """`pixels[index]` of the request holds a preview of its clean image after `step` steps."""

    request_id: str
    index: int
    step: int


class Finished(Message, frozen=True):
    """Terminal. The last of the request's `pixels` holds the image."""

    request_id: str
    ms: dict[str, float]  # milliseconds by part, as in the API's `stencil.ms`
    text_tokens: int  # of the prompt
    prompt_truncated: bool
    cache: CacheResult
    tier: Tier | None  # the slowest tier that its pages came from; None unless a hit
    is_primed: bool  # pages were primed for it, by itself or by an earlier edit of its template
    full_blocks: int  # most blocks that one of its mask-aware steps computed in full
    made: float  # when the workers had finished it, seconds of CLOCK_MONOTONIC
    degrees: tuple[int, ...] = ()  # of each computed step, the number of ranks that computed it together


class TemplatePrimed(Message, frozen=True):
    """Terminal, for PrimeTemplate."""

    request_id: str
    nbytes: int  # of its pages and clean latents
    ms: float  # worker time spent on it


class AdapterAdded(Message, frozen=True):
    """Terminal, for LoadAdapter: every rank of the engine has it."""

    request_id: str
    patch: str  # its id


class Failed(Message, frozen=True):
    """Terminal."""

    request_id: str
    failure: Failure


class Aborted(Message, frozen=True):
    """Terminal."""

    request_id: str


class EngineOutputs(Message, frozen=True):
    """The outputs of one iteration of the engine, with its load."""

    outputs: tuple[PartialImage | Finished | TemplatePrimed | AdapterAdded | Failed | Aborted, ...]
    load: LoadReport
    stats: EngineStats | None = None  # None if the last ones are recent enough


class EngineAlive(Message, frozen=True):
    """Heartbeat: the engine's event loop is running. Sent regularly, from the start of its process to the end."""


class EngineFailed(Message, frozen=True):
    """The engine cannot continue, or could not start."""

    failure: Failure
    # Terminal messages of the requests it held; the receiver fails all others.
    outputs: tuple[Finished | TemplatePrimed | AdapterAdded | PartialImage | Failed | Aborted, ...] = ()


FromEngine = EngineReady | EngineOutputs | EngineAlive | EngineFailed
