"""The op image_encode: initial noise, the denoiser's condition and the sampler's state, from template and mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.graph.op import OpWork, Port, Sizes
from core.graph.work import Work
from core.graph.workflow import Node
from core.handles import ArrayRef
from core.messages.message import Message
from core.scheduling.ops.request_op import RequestOp

if TYPE_CHECKING:
    from core.messages.worker import ItemResult
    from core.scheduling.node_cache import NodePages
    from core.scheduling.requests.request import Request


class ImageEncode(Message, OpWork, frozen=True, omit_defaults=True):
    """template, references and mask -> `latents` (initial noise), `condition` (the denoiser's input from them),
    `outside` (with which the sampler restores the template outside the mask), `sigmas`, and the sampler's state. In a
    pass after another one it reads `latents` of `upscale`, which are noised instead of the template's. Where it reads a
    `picture`, uint8 [height, width, 3], that is its template.

    Random numbers are drawn as the family's diffusers pipeline does, in the same order, from
    ``torch.Generator("cpu").manual_seed(seed)``.
    """

    template: ArrayRef | None  # None: an empty canvas, unless it reads `picture`
    mask: ArrayRef | None  # None: everything, unless it reads `mask` of `segment`
    width: int
    height: int
    seed: int
    num_inference_steps: int
    num_denoising_steps: int  # the run makes the last ones of these steps
    computed_steps: tuple[int, ...]  # numbers of the run's steps that are computed, rising from 0
    is_exact: bool  # False: the edit is mask-aware, and the VAE may compute in a faster dtype
    shift: float | None = None  # of noise levels; None: as the scheduler shifts them
    sigmas: tuple[float, ...] | None = None  # noise levels before that; None: evenly spaced
    # Of all noise levels, the highest counted as 0 and the lowest as 1: those whose steps follow.
    begin: float = 0.0
    end: float = 1.0
    cache_salt: str = ""  # the encoder's output is kept, and reused for an equal template with the same salt
    references: tuple[ArrayRef, ...] = ()  # those that a step computes; of others only the number of tokens matters
    paged_reference_tokens: int = 0
    num_controls: int = 0  # control pictures
    noise_first: bool = False  # the seed draws the noise before what the VAE samples of the template
    # The noise is that of this picture, where the seed draws that of so many in turn.
    index: int = 0
    number: int = 1
    starts_over: bool = False  # at full strength, too, the noise is over the latents or the picture, if it has any
    is_recalled: bool = False  # the steps begin with a kept state: no latents are made


def _size(sizes: Sizes) -> Work:
    return Work.of([sizes.num_tokens + sizes.num_reference_tokens - sizes.num_paged_reference_tokens])


def _make(request: Request, node: Node, pages: NodePages) -> ImageEncode:
    spec, region = request.picture, request.workflow.begins[node.name]
    sampling, canvas = spec.sampling.with_steps(region.steps), spec.canvas(node.canvas)
    paged = spec.num_paged_reference_tokens
    num_steps = sampling.steps_at(sampling.number(region.strength))
    assert sampling.seed is not None
    assert sampling.num_inference_steps is not None
    return ImageEncode(
        template=canvas.template,
        mask=None if any(edge.input == "mask" for edge in node.inputs) else canvas.mask,
        width=canvas.width,
        height=canvas.height,
        seed=int(node.literals.get("seed", sampling.seed)),
        num_inference_steps=sampling.num_inference_steps,
        num_denoising_steps=num_steps,
        computed_steps=sampling.computed_of_last(num_steps),
        shift=sampling.shift,
        sigmas=sampling.sigmas,
        begin=sampling.number(region.begin),
        end=sampling.number(region.end),
        is_exact=not spec.is_mask_aware,
        cache_salt=spec.cache_salt,
        references=() if paged else spec.references,
        paged_reference_tokens=paged,
        num_controls=0 if node.role else len(spec.controls),
        noise_first=bool(node.literals.get("noise_first", False)),
        index=spec.index,
        number=spec.number,
        starts_over=bool(node.literals.get("starts_over", False)),
        is_recalled=spec.state is not None,
    )


def _note(request: Request, result: ItemResult) -> None:
    """Only the sampler knows how many steps a part of its noise levels has."""
    region, rounds = request.workflow.begins[result.node], len(result.sigmas) - 1
    if region.is_part and request.progress.rounds[region.name] != rounds:
        request.progress.set_rounds(region.name, rounds)


IMAGE_ENCODE = RequestOp(
    name="image_encode",
    component="vae",
    message=ImageEncode,
    size=_size,
    part="encode",
    inputs=(
        Port("start", "latents", is_optional=True),
        Port("mask", "mask", is_optional=True),
        Port("picture", "picture", is_optional=True),
    ),
    outputs=(
        Port("latents", "latents"),
        Port("condition", "condition"),
        Port("outside", "outside"),
        Port("sigmas", "noise levels"),
        Port("sampler", "sampler state", is_optional=True),
    ),
    literals=("canvas", "seed", "noise_first", "starts_over"),
    begins_region=True,
    make=_make,
    note=_note,
)
