"""The op denoise: one denoising step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.graph.op import OpWork, Port, Sizes
from core.graph.work import Work
from core.graph.workflow import Node
from core.handles import ArrayRef, EntryRef
from core.messages.message import Message
from core.messages.worker import PageSpan
from core.patches import PatchSet
from core.scheduling.ops.request_op import RequestOp

if TYPE_CHECKING:
    from core.scheduling.node_cache import NodePages
    from core.scheduling.requests.request import Request


class Denoise(Message, OpWork, frozen=True, omit_defaults=True):
    """One step. It reads `condition`, `outside` and `sigmas` of `image_encode`; the text encoder's outputs, unless the
    picture is of a class; `residuals` of `controlnet`, if there are any; and `latents` and `sampler` (the sampler's
    state, a series) of the step before. It makes new `latents` and `sampler`. If the request has its own pages,
    `sampler` ends with two tensors more: the latents before the step that makes its pages, and the last velocity of
    every token.
    """

    # Every step.
    step: int  # from 0
    width: int  # px
    height: int  # px
    active: ArrayRef | None  # int32 indices of the tokens to compute; None: all
    guidance_scale: float
    keep_clean: bool  # also store `clean`, the predicted clean latents (z - sigma * v), for a partial image
    true_cfg_scale: float = 1.0  # scale of classifier-free guidance, with a negative prompt or class
    class_label: int | None = None  # class of the picture, without text encoder; guidance adds a row of any class
    patches: PatchSet = ()
    kept_state: ArrayRef | None = None  # memory for a copy of the new latents, float32 [image tokens, latent width]
    reference_sizes: tuple[tuple[int, int], ...] = ()  # (width, height) of the picture's references, in px
    is_steered: bool = False  # `residuals` has something for its blocks
    # Mask-aware steps: where inactive tokens come from, the template's pages or the request's own.
    pages: PageSpan | None = None
    own_page_step: int | None = None  # the step that makes its own pages; that step computes all tokens
    full_blocks: tuple[int, ...] = ()  # blocks that compute all tokens; leading ones if pages hold keys and values
    # From these, full blocks make inactive tokens as in priming.
    template: EntryRef | None = None  # its clean latents
    content_id: str = ""
    cache_salt: str = ""


def _size(sizes: Sizes) -> Work:
    return Work.of_pairs([(sizes.num_step_tokens, sizes.num_all_tokens)] * sizes.num_rows)


def _make(request: Request, node: Node, pages: NodePages) -> Denoise:
    step = request.progress.scheduled[node.name]
    is_masked = pages.span is not None or request.picture.own_page_step(step) not in (None, step)
    return step_of(request, node, pages, is_masked=is_masked)


def step_of(request: Request, node: Node, pages: NodePages, *, is_masked: bool) -> Denoise:
    """A request's next step. pages: that it reads. is_masked: it computes the active tokens alone."""
    spec, progress = request.picture, request.progress
    assert spec.sampling.guidance_scale is not None
    step, canvas = progress.scheduled[node.name], spec.canvas(node.canvas)
    return Denoise(
        step=step,
        width=canvas.width,
        height=canvas.height,
        active=canvas.active if is_masked else None,
        guidance_scale=spec.sampling.guidance_scale,
        true_cfg_scale=spec.sampling.true_cfg_scale or 1.0,
        class_label=spec.class_label,
        keep_clean=progress.is_shown_next(node),
        pages=pages.span,
        own_page_step=spec.own_page_step(step),
        full_blocks=pages.full_blocks,
        template=pages.latents,
        content_id=spec.content_id,
        cache_salt=spec.cache_salt,
        patches=request.patches_of(node),
        kept_state=spec.kept_states.get(step + 1),
        reference_sizes=spec.reference_sizes,
        is_steered=not node.role and spec.is_steered(step, progress.rounds[node.region]),
    )


DENOISE = RequestOp(
    name="denoise",
    component="transformer",
    message=Denoise,
    size=_size,
    part="denoise",
    sharing="together",
    parallel="sequence",
    inputs=(
        # All three are connected, or none if the picture is of a class.
        Port("prompt_embeds", "text embeddings", is_optional=True),
        Port("text_lengths", "text lengths", is_optional=True),
        Port("pooled_prompt_embeds", "pooled text embeddings", is_optional=True),
        Port("latents", "latents"),
        Port("condition", "condition"),
        Port("outside", "outside"),
        Port("sigmas", "noise levels"),
        Port("sampler", "sampler state", is_optional=True),
        Port("residuals", "residuals", is_optional=True),  # of ControlNets, where the workflow has some
    ),
    outputs=(
        Port("latents", "latents"),
        Port("sampler", "sampler state", is_optional=True),
        Port("clean", "latents", is_optional=True),
    ),
    pages="span",
    literals=("canvas",),
    make=_make,
)
