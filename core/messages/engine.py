"""Messages from the API server to an EngineCore, and back."""

from __future__ import annotations

from typing import Literal

from core.costs.load_report import EngineStats, LoadReport
from core.failure import Failure
from core.handles import ArrayRef, Tier
from core.messages.message import Message
from core.model_info import ModelInfo
from core.sampling_params import SamplingParams


class EditRequest(Message, frozen=True):
    """One image to make. Every array is in the sender's arena and stays valid until the terminal message.

    template, mask, active: as in PreparedImages. pixels: uint8 [height, width, 3], one per requested partial image and
    the final one last; written by the worker. latents: float32 [image tokens, latent_width], scratch for moving the
    sampler's state between ranks. num_tokens: image tokens; num_condition_tokens: condition tokens, which no mask-aware
    step computes. max_text_tokens: length to which the prompt is padded or cut. extra_text_tokens: see
    `ModelInfo.text_tokens_beside`. sampling: resolved, without a None that the model needs. is_mask_aware: steps after
    the first `sampling.full_steps` compute only the active tokens, over the template's pages; decided from the request
    and the server's flags alone. deadline: absolute, or None. objective: when the worker must be done to meet the
    server's latency objective, absolute; None: it has none, or was admitted although it will miss it. cache_salt: see
    `CacheConfig.salt`. trace_context: W3C traceparent of the parent of the engine's spans; "" = not traced. runs_alone:
    no other request runs beside it, because it was running when engines died. owner: digest of its API key, "" = none;
    owners get equal shares of the engine.
    """

    request_id: str
    model: str
    prompt: str
    sampling: SamplingParams
    width: int
    height: int
    template: ArrayRef
    mask: ArrayRef
    active: ArrayRef
    content_id: str
    num_tokens: int
    max_text_tokens: int
    pixels: tuple[ArrayRef, ...]
    latents: ArrayRef
    arrival: float
    num_condition_tokens: int = 0
    deadline: float | None = None
    objective: float | None = None
    is_mask_aware: bool = False
    runs_alone: bool = False
    trace_context: str = ""
    extra_text_tokens: int = 0
    cache_salt: str = ""
    owner: str = ""

    @property
    def num_text_tokens(self) -> int:
        """Text tokens of each row in the denoiser."""
        return self.max_text_tokens + self.extra_text_tokens

    @property
    def num_partial_images(self) -> int:
        return len(self.pixels) - 1


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


class DropTemplate(Message, frozen=True):
    """Drop a template's pages on every tier, disk included, once no edit uses them. It has no answer."""

    model: str
    content_id: str
    cache_salt: str = ""  # pages with other salts stay, see CacheConfig.salt


class Abort(Message, frozen=True):
    """Abort these requests. Each still gets its terminal message: Aborted, or another one if it has ended already."""

    request_ids: tuple[str, ...]


class Drain(Message, frozen=True):
    """Finish all accepted requests, then exit. New ones are refused by the sender, not here."""


ToEngine = EditRequest | PrimeTemplate | DropTemplate | Abort | Drain


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
    cache: Literal["hit", "miss", "off"]  # whether no page had to be primed for it; off: an exact run
    tier: Tier | None  # the slowest tier that its pages came from; None unless a hit
    is_primed: bool  # pages were primed for it, by itself or by an earlier edit of its template
    full_blocks: int  # most blocks that one of its mask-aware steps computed in full


class TemplatePrimed(Message, frozen=True):
    """Terminal, for PrimeTemplate."""

    request_id: str
    nbytes: int  # of its pages and clean latents
    ms: float  # worker time spent on it


class Failed(Message, frozen=True):
    """Terminal."""

    request_id: str
    failure: Failure


class Aborted(Message, frozen=True):
    """Terminal."""

    request_id: str


class EngineOutputs(Message, frozen=True):
    """The outputs of one iteration of the engine, with its load."""

    outputs: tuple[PartialImage | Finished | TemplatePrimed | Failed | Aborted, ...]
    load: LoadReport
    stats: EngineStats | None = None  # None if the last ones are recent enough


class EngineAlive(Message, frozen=True):
    """Heartbeat: the engine's event loop is running. Sent regularly, from the start of its process to the end."""


class EngineFailed(Message, frozen=True):
    """The engine cannot continue, or could not start."""

    failure: Failure
    # Terminal messages of the requests it held; the receiver fails all others.
    outputs: tuple[Finished | TemplatePrimed | PartialImage | Failed | Aborted, ...] = ()


FromEngine = EngineReady | EngineOutputs | EngineAlive | EngineFailed
