"""Messages from an EngineCore to a worker, and back."""

from __future__ import annotations

import msgspec

from core.config import CacheConfig, ModelConfig, SchedulerConfig
from core.costs.cost_model import Work
from core.failure import Failure
from core.handles import ArrayRef, EntryRef, ModelKey, TensorKey, TensorRef, Tier
from core.messages.message import Message
from core.model_info import ModelInfo
from core.page_scheme import PageDtype


class TextEncode(Message, frozen=True):
    """prompt -> `prompt_embeds` [text tokens of all rows, width], `text_lengths` int64 [rows] and
    `pooled_prompt_embeds` [rows, width] under this item's node: a row for the prompt, and one for the negative prompt
    if there is one.
    """

    prompt: str
    max_sequence_length: int
    negative_prompt: str | None = None
    template: ArrayRef | None = None  # the picture, for encoders that see it
    content_id: str = ""  # of the picture
    cache_salt: str = ""  # embeddings are cached, and reused only with the same salt


class ImageEncode(Message, frozen=True):
    """template and mask -> `latents` (initial noise), `condition` (the denoiser's input from template and mask),
    `outside` (with which the sampler restores the template outside the mask), `sigmas`, and the sampler's state.

    Random numbers are drawn as the family's diffusers pipeline does, in the same order, from
    ``torch.Generator("cpu").manual_seed(seed)``.
    """

    template: ArrayRef
    mask: ArrayRef
    width: int
    height: int
    seed: int
    num_inference_steps: int
    num_denoising_steps: int  # number of steps run, the last ones


class EncodeTemplate(Message, frozen=True):
    """template -> its clean latents (the posterior's mode), [image tokens, latent width] in the compute dtype, written
    to `out`.
    """

    template: ArrayRef
    width: int
    height: int
    out: EntryRef


class Prime(Message, frozen=True):
    """One chunk of a keyframe's pass: all image tokens of a template at noise level `sigma` through a range of blocks;
    their keys and values are written to the pages of `out`. Between chunks the hidden state is in the tensor store. Set
    by `core.scheduling.stage_work`.
    """

    # The noisy template.
    latents: EntryRef  # its clean latents
    content_id: str  # seeds the noise
    sigma: float
    width: int  # px
    height: int  # px
    # The conditioning, from the PageScheme.
    prompt: str
    max_sequence_length: int
    guidance_scale: float
    # The work.
    blocks: tuple[int, int]  # [start, stop)
    dtype: PageDtype  # of the pages
    out: EntryRef
    template: ArrayRef | None = None  # its pixels, for text encoders that see them
    cache_salt: str = ""  # embeddings are cached, and reused only with the same salt


class PageSpan(msgspec.Struct, frozen=True):
    """A template's pages at a noise level between two keyframes: (1 - weight) * near + weight * far; far is None
    exactly at a keyframe.
    """

    dtype: PageDtype
    near: EntryRef
    far: EntryRef | None
    weight: float


class Denoise(Message, frozen=True):
    """One step: reads `latents`, `condition`, `outside`, `sigmas` of `image_encode` and the text encoder's outputs;
    replaces `latents`. Set by `core.scheduling.stage_work`.
    """

    # Every step.
    step: int  # from 0
    num_inference_steps: int
    width: int  # px
    height: int  # px
    active: ArrayRef | None  # int32 indices of the tokens to compute; None: all, without pages
    guidance_scale: float
    keep_clean: bool  # also store `clean`, the predicted clean latents (z - sigma * v), for a partial image
    true_cfg_scale: float = 1.0  # of classifier-free guidance, with a negative prompt
    # Mask-aware steps: where inactive tokens come from.
    pages: PageSpan | None = None
    full_blocks: tuple[int, ...] = ()  # compute all tokens nevertheless; leading ones if pages hold keys and values
    # In full blocks inactive tokens are made as in priming, from:
    template: EntryRef | None = None  # its clean latents
    content_id: str = ""
    cache_salt: str = ""


class Decode(Message, frozen=True):
    """Latents (`clean` for a partial image, else `latents`) -> `pixels`."""

    width: int
    height: int
    partial: bool
    pixels: ArrayRef  # uint8 [height, width, 3] in shared memory, written by the worker
    active: ArrayRef | None = None  # int32 indices of the computed tokens; None: all
    template_latents: EntryRef | None = None  # the latents of all other tokens
    template: ArrayRef | None = None  # pixels far from every active token are copied from it


StageWork = TextEncode | ImageEncode | EncodeTemplate | Prime | Denoise | Decode


class Item(msgspec.Struct, frozen=True):
    """One request's part in a batch: which node of its stage graph runs, on which tensors."""

    request_id: str
    node: str
    work: StageWork
    inputs: tuple[TensorRef, ...]


class Batch(msgspec.Struct, frozen=True):
    """The unit of dispatch: one stage of one model over one or more items, on these ranks."""

    id: int
    stage: str
    model: ModelKey
    ranks: tuple[int, ...]
    items: tuple[Item, ...]


class Transfer(msgspec.Struct, frozen=True):
    """Move a tensor between ranks through shared memory: `source` writes it to ref.handle; readers name the handle."""

    ref: TensorRef
    source: int


class PageCopy(msgspec.Struct, frozen=True):
    """Copy an entry's pages from one tier to the next, block after block, in parallel with computing."""

    key: str
    nbytes: int
    block_bytes: int  # bytes of one block's page
    source: Tier
    target: Tier
    host: ArrayRef | None  # its place in the page arena, if one of the tiers is the host


class StepPlan(Message, frozen=True):
    """What one rank does next: load, forget, delete, copies, batches, transfers, free, unload, in this order. Made by
    the StepScheduler.
    """

    seq: int
    # The activation cache.
    forget: tuple[str, ...] = ()  # keys of entries to drop from device memory
    delete: tuple[str, ...] = ()  # files to delete: keys of entries, or of templates (without "-") for all of theirs
    copies: tuple[PageCopy, ...] = ()  # started, not awaited
    # Requests.
    batches: tuple[Batch, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    free: tuple[TensorKey, ...] = ()  # tensors of ended requests; "" as node and name stands for all
    # Models.
    load: tuple[ModelKey, ...] = ()
    unload: tuple[ModelKey, ...] = ()


class Shutdown(Message, frozen=True):
    """Exit after the plans already queued."""


ToWorker = StepPlan | Shutdown


class WorkerConfig(msgspec.Struct, frozen=True):
    """The configuration of a worker process, which also inherits the file descriptors (channel memory, channel socket,
    arena, page arena).
    """

    rank: int
    models: tuple[ModelConfig, ...]
    arena_id: int
    page_arena_id: int
    cache: CacheConfig
    scheduler: SchedulerConfig = SchedulerConfig()  # limits of a batch
    num_workers: int = 1  # worker processes that share this machine's cores
    device_index: int = 0  # its number among them: the GPU that it uses unless one is configured


class CostSample(msgspec.Struct, frozen=True):
    """A measured batch, from which the cost model starts."""

    model: ModelKey
    stage: str
    work: Work
    seconds: float


class WorkerReady(Message, frozen=True):
    """The worker has loaded its models and accepts plans."""

    rank: int
    models: tuple[ModelInfo, ...]
    samples: tuple[CostSample, ...] = ()  # measured once per model and device, and kept on disk
    device_page_bytes: int = 0  # device memory for pages


class ItemResult(msgspec.Struct, frozen=True):
    """The result of one item."""

    request_id: str
    node: str
    tensors: tuple[TensorRef, ...] = ()
    text_tokens: int = 0  # set by text encoding
    prompt_truncated: bool = False  # set by text encoding
    sigmas: tuple[float, ...] = ()  # set by image encoding: noise levels of the run, from its first step to 0
    failure: Failure | None = None  # None: it succeeded


class BatchResult(Message, frozen=True):
    """One batch is done; items that failed contain a failure."""

    batch_id: int
    rank: int
    started: float
    seconds: float  # worker time, first to last kernel
    items: tuple[ItemResult, ...]
    num_parts: int = 1  # forward passes; above 1 it failed as a whole and was halved, see core/scheduling/halving.py


class TransferDone(Message, frozen=True):
    """The tensor is in shared memory at ref.handle, written by `rank`."""

    rank: int
    ref: TensorRef


class PageCopied(Message, frozen=True):
    """A PageCopy is over."""

    rank: int
    key: str
    nbytes: int
    source: Tier
    target: Tier
    ok: bool  # the pages are on the target tier; otherwise the file was missing or damaged, or there was no room
    seconds: float  # duration of the copy


class WorkerFailed(Message, frozen=True):
    """The worker could not start or cannot continue; it exits after this message."""

    rank: int
    failure: Failure


FromWorker = WorkerReady | BatchResult | TransferDone | PageCopied | WorkerFailed
