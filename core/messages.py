"""Every message between actors: one frozen msgspec Struct each, grouped by receiver; arrays only as handles.

Messages travel as msgpack (ZeroMQ between API server and EngineCore, `core.ipc.ring` elsewhere on one host). Unions at
the end of each group are what a receiver decodes. Times are seconds of CLOCK_MONOTONIC unless a name says otherwise.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from core.config import CacheConfig, ModelConfig
from core.cost_model import Work
from core.failure import Failure
from core.handles import ArrayRef, EntryRef, ModelKey, TensorKey, TensorRef, Tier
from core.load_report import EngineStats, LoadReport
from core.page_scheme import PageDtype, PageScheme
from core.request import SamplingParams
from core.vision_tokens import VisionTokens


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of every tagged message."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded model can do; learnt by the worker at load time and sent up in the Ready messages.

    native_size: side in pixels of the square whose area caps the generation size. token_size: pixels per token side.
    latent_width: floats per token of the packed latents. max_text_tokens: the text encoder's length.
    extra_text_tokens: further ones that a prompt has in the denoiser, whatever its length. has_guidance: whether
    guidance_scale has a meaning, which with is_guidance_cfg is that of classifier-free guidance, else of an embedding.
    has_true_cfg: whether true_cfg_scale has one; default_true_cfg_scale: where a request gives a negative prompt alone.
    solver_order: the sampler's. extra_steps: calls of the model that it takes beyond those of its order.
    rounds_strength_down: whether a step that strength covers in part is left out; else it is done. min_inference_steps:
    fewest that the sampler can do. max_side: tokens of a picture's longest side, None for any. vision: what the
    template is to a text encoder that sees it, None where it does not. conditions_per_token: condition tokens per image
    token, 1 where the denoiser sees the clean template as tokens of its own. page_scheme: how templates are cached,
    None where the model is served without mask-aware execution. device: its type; which of several alike it is makes no
    difference to anybody. parent: the model that this is an adapter of, "" for a model itself.
    """

    name: str
    family: str
    native_size: int
    token_size: int
    latent_width: int
    max_text_tokens: int
    default_num_inference_steps: int
    default_guidance_scale: float
    has_guidance: bool
    has_true_cfg: bool
    device: str
    dtype: str
    is_guidance_cfg: bool = False
    extra_text_tokens: int = 0
    default_true_cfg_scale: float = 1.0
    solver_order: int = 1
    extra_steps: int = 0
    rounds_strength_down: bool = False
    min_inference_steps: int = 1
    max_side: int | None = None
    vision: VisionTokens | None = None
    conditions_per_token: int = 0
    page_scheme: PageScheme | None = None
    parent: str = ""

    def num_steps(self, sampling: SamplingParams) -> int:
        """Steps of a run, each one call of the model: a solver of order o takes o for each of its noise levels, but one
        for the last, and PNDM one more. sampling: with its num_inference_steps."""
        return self.solver_order * (sampling.num_denoising_steps - 1) + 1 + self.extra_steps

    def num_text_tokens(self, max_sequence_length: int | None = None) -> int:
        """Text tokens of a row in the denoiser, with a prompt of so many at most (None: the encoder's length), but for
        those of a picture that the encoder sees."""
        return (max_sequence_length or self.max_text_tokens) + self.extra_text_tokens

    def text_tokens_beside(self, width: int, height: int) -> int:
        """Text tokens of a row that are not the prompt's, for a template of so many pixels."""
        return self.extra_text_tokens + (0 if self.vision is None else self.vision.count(width, height))


# --------------------------------------------------------------------------------- to an image processor, and back

MaskKind = Literal["alpha", "luminance"]  # alpha: transparent = edit (OpenAI's `mask`); luminance: >= 128 = edit
OutputFormat = Literal["png", "webp", "jpeg"]
Box = tuple[int, int, int, int]  # left, top, right, bottom; pixels


class PrepareEdit(Message, frozen=True):
    """Decode and check an upload, make what the engine needs of it.

    image: encoded file bytes, uint8 [bytes]; None makes an empty canvas of `canvas_size`. mask: likewise; None takes
    the image's own transparency, or everything. padding_mask_crop: pixels of the upload; the mask's box with so many
    around it is what the engine sees, at the model's full area; None: it sees the whole. mask_margin: pixels of
    generation size. scratch: uint8 [bytes] to carve the results from; at least
    `engine.image_ops.scratch_bytes(native_size, token_size)`.
    """

    job_id: int
    image: ArrayRef | None
    mask: ArrayRef | None
    mask_kind: MaskKind
    canvas_size: tuple[int, int] | None  # (width, height)
    mask_margin: int
    native_size: int
    token_size: int
    max_pixels: int
    scratch: ArrayRef
    max_side: int | None = None  # tokens of the longest side, None for any
    padding_mask_crop: int | None = None


class PreparedEdit(Message, frozen=True):
    """The answer to PrepareEdit. All arrays lie in its scratch.

    template: uint8 [height, width, 3] RGB at generation size. mask: uint8 [height, width], 1 = edit. active: int32
    [active tokens], row-major token indices, ascending. content_id: hex digest of (format version, width, height, RGB).
    """

    job_id: int
    upload_width: int
    upload_height: int
    width: int
    height: int
    template: ArrayRef
    mask: ArrayRef
    active: ArrayRef
    content_id: str
    unmasked: bool  # no mask was given and the image is opaque: everything is regenerated
    crop: Box | None = None  # the part of the upload that all this is of, None: the whole


class ComposeImage(Message, frozen=True):
    """Paste generated pixels into the original upload under its mask and encode the result.

    pixels: uint8 [height, width, 3] at generation size. image, mask, mask_kind, canvas_size: as in PrepareEdit. crop:
    of the answer to it.
    output_size: (width, height) to resize the composite to; None = upload size. compression: 0..100, jpeg and webp
    quality (100 = lossless for webp). out: uint8 [bytes] to write to, at least `engine.image_ops.encoded_bytes(...)`.
    """

    job_id: int
    pixels: ArrayRef
    image: ArrayRef | None
    mask: ArrayRef | None
    mask_kind: MaskKind
    canvas_size: tuple[int, int] | None
    output_size: tuple[int, int] | None
    output_format: OutputFormat
    compression: int
    base64: bool
    max_pixels: int
    out: ArrayRef
    crop: Box | None = None


class ComposedImage(Message, frozen=True):
    """The answer to ComposeImage: `encoded` is the written part of `out`, uint8 [bytes] (base64 text if asked)."""

    job_id: int
    encoded: ArrayRef
    width: int
    height: int


class JobFailed(Message, frozen=True):
    job_id: int
    failure: Failure


ToImageProcessor = PrepareEdit | ComposeImage
FromImageProcessor = PreparedEdit | ComposedImage | JobFailed


# ------------------------------------------------------------------------------------------- to EngineCore, and back


class EditRequest(Message, frozen=True):
    """One image to make. Every array lies in the sender's arena and stays valid until the terminal message.

    template, mask, active: as in PreparedEdit. pixels: uint8 [height, width, 3], one per partial image asked for and
    the final one last; the worker writes them. latents: float32 [image tokens, latent_width], scratch for moving the
    sampler's state between ranks. num_tokens: the picture's image tokens; num_condition_tokens: its condition tokens,
    which no mask-aware step computes. max_text_tokens: what the prompt is padded or cut to. extra_text_tokens: as of
    `ModelInfo.text_tokens_beside`. sampling: resolved, nothing in it is None that the model needs. is_mask_aware: steps
    after the first `sampling.full_steps` compute only the active tokens, over the template's pages; decided from the
    request and the server's flags alone. deadline: absolute, or None.
    objective: when the worker is to be done with it for the server's latency objective to be met, absolute; None: it
    has none, or was let in though it will miss it.
    trace_context: W3C traceparent of the span that the engine's own go under; "" = not traced. runs_alone: no other
    request is begun or goes on while it runs, since it was there when engines died.
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

    template, content_id, width, height: as in PreparedEdit. num_tokens: its image tokens. is_idle_work: compute only
    when no edit wants to.
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


class DropTemplate(Message, frozen=True):
    """Forget a template's pages on every tier, disk included, once no edit uses them. It has no answer."""

    model: str
    content_id: str


class Abort(Message, frozen=True):
    """Give these requests up; each still gets its terminal message (Aborted, or what it had reached)."""

    request_ids: tuple[str, ...]


class Drain(Message, frozen=True):
    """Finish what was accepted, refuse nothing here (the door is shut upstream), then exit."""


ToEngine = EditRequest | PrimeTemplate | DropTemplate | Abort | Drain


class EngineReady(Message, frozen=True):
    models: tuple[ModelInfo, ...]


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
    full_blocks: leading blocks computed in full at the step where these were most.
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


# ------------------------------------------------------------------------------------------------ to a worker, and back


class TextEncode(Message, frozen=True):
    """prompt -> `prompt_embeds` [text tokens of all rows, width], `text_lengths` int64 [rows] and
    `pooled_prompt_embeds` [rows, width] under this item's node: the prompt's row, and the negative prompt's where there
    is one.

    template, content_id: the picture, for encoders that see it.
    """

    prompt: str
    max_sequence_length: int
    negative_prompt: str | None = None
    template: ArrayRef | None = None
    content_id: str = ""


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
    template: its pixels, where the text encoder sees them.
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

    active: int32 token indices to compute, over `pages`; None computes all and needs no pages. full_blocks: leading
    blocks that compute all tokens all the same; inactive tokens then enter as in priming, from `template` (its clean
    latents) and `content_id`. keep_clean: also store `clean`, the predicted clean latents (z - sigma * v), for a
    partial image.
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
    full_blocks: int = 0
    template: EntryRef | None = None
    content_id: str = ""


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
    num_workers: int = 1  # worker processes that share this machine's cores
    device_index: int = 0  # its place among them: the GPU it takes where no other one was named


class CostSample(msgspec.Struct, frozen=True):
    """How long a batch of this size takes on a worker: what the cost model starts from."""

    model: ModelKey
    stage: str
    work: Work
    seconds: float


class WorkerReady(Message, frozen=True):
    """samples: measured once per model and device, and kept; empty where nothing was measured."""

    rank: int
    models: tuple[ModelInfo, ...]
    samples: tuple[CostSample, ...] = ()


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
    (see core/halving.py).
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
