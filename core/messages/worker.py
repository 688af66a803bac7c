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
    `pooled_prompt_embeds` [rows, width] under this item's node: the prompt's row, and the negative prompt's where there
    is one.

    template, content_id: the picture, for encoders that see it. cache_salt: embeddings are kept, and found again by
    prompts of the same salt alone.
    """

    prompt: str
    max_sequence_length: int
    negative_prompt: str | None = None
    template: ArrayRef | None = None
    content_id: str = ""
    cache_salt: str = ""


class ImageEncode(Message, frozen=True):
    """template and mask -> `latents` (initial noise), `condition` (what the denoiser sees of template and mask),
    `outside` (what the sampler keeps the template with outside the mask) and `sigmas`; beside them the sampler's state.

    Random draws are the family's pipeline's own, in its own order, from ``torch.Generator("cpu").manual_seed(seed)``.
    """

    template: ArrayRef
    mask: ArrayRef
    width: int
    height: int
    seed: int
    num_inference_steps: int
    num_denoising_steps: int  # the last so many of them are run


class EncodeTemplate(Message, frozen=True):
    """template -> its clean latents (the posterior's mode), [image tokens, latent width] in the compute dtype, written
    to `out`.
    """

    template: ArrayRef
    width: int
    height: int
    out: EntryRef


class Prime(Message, frozen=True):
    """One chunk of a keyframe's pass: all image tokens of a template at noise level `sigma`, through the blocks
    [start, stop); their keys and values go to the pages of `out`. The hidden state waits in the tensor store.

    latents: the template's clean latents. content_id: seeds the noise. prompt, guidance_scale: the conditioning.
    template: its pixels, where the text encoder sees them. cache_salt: what is made of the template is kept, and found
    again with the same salt alone.
    """

    latents: EntryRef
    content_id: str
    sigma: float
    width: int
    height: int
    prompt: str
    max_sequence_length: int
    guidance_scale: float
    blocks: tuple[int, int]
    dtype: PageDtype
    out: EntryRef
    template: ArrayRef | None = None
    cache_salt: str = ""


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
    replaces `latents`. true_cfg_scale: of classifier-free guidance, where there is a negative prompt.

    active: int32 token indices to compute, over `pages`; None computes all and needs no pages. full_blocks: those that
    compute all tokens all the same, the leading ones where pages hold keys and values; inactive tokens then enter as in
    priming, from `template` (its clean latents), `content_id` and `cache_salt`. keep_clean: also store `clean`, the
    predicted clean latents (z - sigma * v), for a partial image.
    """

    step: int
    num_inference_steps: int
    width: int
    height: int
    active: ArrayRef | None
    guidance_scale: float
    keep_clean: bool
    true_cfg_scale: float = 1.0
    pages: PageSpan | None = None
    full_blocks: tuple[int, ...] = ()
    template: EntryRef | None = None
    content_id: str = ""
    cache_salt: str = ""


class Decode(Message, frozen=True):
    """Latents (`clean` for a partial image, else `latents`) -> `pixels`, uint8 [height, width, 3] in shared memory.

    active: int32 token indices that were computed, None for all; the others are the template's: their latents are
    `template_latents`, and pixels far from every active token are `template` itself.
    """

    width: int
    height: int
    partial: bool
    pixels: ArrayRef
    active: ArrayRef | None = None
    template_latents: EntryRef | None = None
    template: ArrayRef | None = None


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
    """Copy an entry's pages from one tier to the next, beside whatever is computed, block after block.

    host: its place in the page arena, where one of the tiers is the host. block_bytes: bytes of one block's page.
    """

    key: str
    nbytes: int
    block_bytes: int
    source: Tier
    target: Tier
    host: ArrayRef | None


class StepPlan(Message, frozen=True):
    """What one rank does next, in this order: load, forget, delete, copies (started, not awaited), batches, transfers,
    free, unload.

    forget: entries whose device memory is given up. delete: entries whose files are removed, or a template's key, which
    has no "-", for all of its.
    """

    seq: int
    forget: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    batches: tuple[Batch, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    free: tuple[TensorKey, ...] = ()
    load: tuple[ModelKey, ...] = ()
    unload: tuple[ModelKey, ...] = ()


class Shutdown(Message, frozen=True):
    """Leave after the plans already queued."""


ToWorker = StepPlan | Shutdown


class WorkerConfig(msgspec.Struct, frozen=True):
    """What a worker process is started with; its file descriptors are (channel memory, channel socket, arena, page
    arena).
    """

    rank: int
    models: tuple[ModelConfig, ...]
    arena_id: int
    page_arena_id: int
    cache: CacheConfig
    scheduler: SchedulerConfig = SchedulerConfig()  # how much it may be given at once
    num_workers: int = 1  # worker processes that share this machine's cores
    device_index: int = 0  # its place among them: the GPU it takes where no other one was named


class CostSample(msgspec.Struct, frozen=True):
    """How long a batch of this size takes on a worker: what the cost model starts from."""

    model: ModelKey
    stage: str
    work: Work
    seconds: float


class WorkerReady(Message, frozen=True):
    """samples: measured once per model and device, and kept; empty where nothing was measured. device_page_bytes: of
    device memory, for pages.
    """

    rank: int
    models: tuple[ModelInfo, ...]
    samples: tuple[CostSample, ...] = ()
    device_page_bytes: int = 0


class ItemResult(msgspec.Struct, frozen=True):
    """What came of one item. text_tokens and prompt_truncated are set by text encoding only; sigmas, the noise levels
    of the run from its first step to 0, by image encoding.
    """

    request_id: str
    node: str
    tensors: tuple[TensorRef, ...] = ()
    text_tokens: int = 0
    prompt_truncated: bool = False
    sigmas: tuple[float, ...] = ()
    failure: Failure | None = None


class BatchResult(Message, frozen=True):
    """One batch is done; what failed of it are the items that carry a failure. seconds: worker time, first to last
    kernel. num_parts: how many forward passes it took; more than one where it failed as a whole and was done in halves
    (see core/scheduling/halving.py).
    """

    batch_id: int
    rank: int
    started: float
    seconds: float
    items: tuple[ItemResult, ...]
    num_parts: int = 1


class TransferDone(Message, frozen=True):
    """The tensor lies in shared memory at ref.handle, written by `rank`."""

    rank: int
    ref: TensorRef


class PageCopied(Message, frozen=True):
    """A PageCopy is over. ok: the pages are on the target tier; not ok: there was no such file, or not a whole one, or
    no room for it. seconds: time the copy took.
    """

    rank: int
    key: str
    nbytes: int
    source: Tier
    target: Tier
    ok: bool
    seconds: float


class WorkerFailed(Message, frozen=True):
    """The worker could not start or cannot go on; it exits after this."""

    rank: int
    failure: Failure


FromWorker = WorkerReady | BatchResult | TransferDone | PageCopied | WorkerFailed
