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
    """One image to make. Every array lies in the sender's arena and stays valid until the terminal message.

    template, mask, active: as in PreparedImages. pixels: uint8 [height, width, 3], one per partial image asked for and
    the final one last; the worker writes them. latents: float32 [image tokens, latent_width], scratch for moving the
    sampler's state between ranks. num_tokens: the picture's image tokens; num_condition_tokens: its condition tokens,
    which no mask-aware step computes. max_text_tokens: what the prompt is padded or cut to. extra_text_tokens: as of
    `ModelInfo.text_tokens_beside`. sampling: resolved, nothing in it is None that the model needs. is_mask_aware: steps
    after the first `sampling.full_steps` compute only the active tokens, over the template's pages; decided from the
    request and the server's flags alone. deadline: absolute, or None.
    objective: when the worker is to be done with it for the server's latency objective to be met, absolute; None: it
    has none, or was let in though it will miss it.
    cache_salt: see `CacheConfig.salt`.
    trace_context: W3C traceparent of the span that the engine's own go under; "" = not traced. runs_alone: no other
    request is begun or goes on while it runs, since it was there when engines died. owner: whose it is, "" = anybody's;
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
        """Of each row in the denoiser."""
        return self.max_text_tokens + self.extra_text_tokens

    @property
    def num_partial_images(self) -> int:
        return len(self.pixels) - 1


class PrimeTemplate(Message, frozen=True):
    """Make a template's pages and keep them. The array lies in the sender's arena and stays valid until the terminal
    message.

    template, content_id, width, height: as in PreparedImages. num_tokens: its image tokens. is_idle_work: compute only
    when no edit wants to. cache_salt: see `CacheConfig.salt`.
    """

    request_id: str
    model: str
    template: ArrayRef
    width: int
    height: int
    content_id: str
    num_tokens: int
    arrival: float
    is_idle_work: bool = False
    cache_salt: str = ""


class DropTemplate(Message, frozen=True):
    """Forget a template's pages on every tier, disk included, once no edit uses them. It has no answer. cache_salt:
    whose pages, see `CacheConfig.salt`; those of others stay.
    """

    model: str
    content_id: str
    cache_salt: str = ""


class Abort(Message, frozen=True):
    """Give these requests up; each still gets its terminal message (Aborted, or what it had reached)."""

    request_ids: tuple[str, ...]


class Drain(Message, frozen=True):
    """Finish what was accepted, refuse nothing here (the door is shut upstream), then exit."""


ToEngine = EditRequest | PrimeTemplate | DropTemplate | Abort | Drain


class EngineReady(Message, frozen=True):
    """device_page_bytes: device memory that its pages may take; 0 where they are read from the host."""

    models: tuple[ModelInfo, ...]
    device_page_bytes: int = 0


class PartialImage(Message, frozen=True):
    """`pixels[index]` of the request holds a preview of its clean image after `step` steps."""

    request_id: str
    index: int
    step: int


class Finished(Message, frozen=True):
    """Terminal. The last of the request's `pixels` holds the image. ms: milliseconds by part, as in the API's
    `stencil.ms`.

    cache: whether all the pages it needed were there when it came; off for an exact run. tier: the slowest tier that
    they came from, of a hit. is_primed: pages were computed for it, by itself or an edit of its template before it.
    full_blocks: blocks computed in full at the step where these were most.
    """

    request_id: str
    ms: dict[str, float]
    text_tokens: int
    prompt_truncated: bool
    cache: Literal["hit", "miss", "off"]
    tier: Tier | None
    is_primed: bool
    full_blocks: int


class TemplatePrimed(Message, frozen=True):
    """Terminal, for PrimeTemplate. nbytes: bytes of its pages. ms: worker time spent on it."""

    request_id: str
    nbytes: int
    ms: float


class Failed(Message, frozen=True):
    """Terminal."""

    request_id: str
    failure: Failure


class Aborted(Message, frozen=True):
    """Terminal."""

    request_id: str


class EngineOutputs(Message, frozen=True):
    """What an iteration of the engine has to say. stats: None where the last ones are recent enough."""

    outputs: tuple[PartialImage | Finished | TemplatePrimed | Failed | Aborted, ...]
    load: LoadReport
    stats: EngineStats | None = None


class EngineAlive(Message, frozen=True):
    """The engine's event loop turns. Said every so often, from its process' start to its end."""


class EngineFailed(Message, frozen=True):
    """The engine cannot go on (or could not start). outputs: the ends of the requests it held; those that it has not
    named are failed by the receiver.
    """

    failure: Failure
    outputs: tuple[Finished | TemplatePrimed | PartialImage | Failed | Aborted, ...] = ()


FromEngine = EngineReady | EngineOutputs | EngineAlive | EngineFailed
