"""Translates a node of the stage graph into a worker's item for one request: its message, size and input tensors."""

from __future__ import annotations

from core.cache.page_reservations import PageReservations
from core.cache.priming import Chunk, PrimingJob
from core.costs.cost_model import Work
from core.graph.workflow import Node, Placement
from core.handles import ArrayRef, TensorKey, TensorRef
from core.messages.worker import Decode, Denoise, EncodeTemplate, ImageEncode, Item, Prime, StageWork, TextEncode
from core.scheduling.request import Request


def make_item(request: Request, node: Node, placement: Placement, pages: PageReservations) -> Item:
    """The request's item in a batch that runs `node` next."""
    return Item(request.id, node.name, _work(request, node, pages), _inputs(request, node, placement))


def latents_item(job: PrimingJob, pages: PageReservations) -> Item:
    """The item that encodes a job's template."""
    template = job.template
    pixels = pages.start_latents(job)
    work = EncodeTemplate(template=pixels, width=template.width, height=template.height, out=pages.latents(template))
    return Item(job.id, "template_encode", work, ())


def chunk_items(job: PrimingJob, chunk: Chunk, pages: PageReservations) -> tuple[Item, ...]:
    """The items of a job's chunk, one per keyframe."""
    pixels = pages.lend_pixels(job) if job.template.is_seen_by_text else None
    return tuple(Item(job.id, "prime", _prime(job, chunk, sigma, pages, pixels), ()) for sigma in chunk.sigmas)


def chunk_work(job: PrimingJob, chunk: Chunk) -> Work:
    """The size of a chunk. Its share of the blocks counts as the same share of the tokens."""
    tokens = job.template.pass_tokens
    start, stop = chunk.blocks
    share = tokens * (stop - start) // job.template.scheme.layout.num_blocks
    return Work((share,) * len(chunk.sigmas), (tokens,) * len(chunk.sigmas))


def exports_needed(request: Request, node: Node, placement: Placement) -> list[TensorKey]:
    """Inputs of `node` from another rank that are not in shared memory yet."""
    keys = [
        TensorKey(request.id, edge.source, edge.name)
        for edge in node.inputs
        if placement[edge.source] != placement[node.name]
    ]
    return [key for key in keys if key not in request.exported]


def node_work(request: Request, node: Node) -> Work:
    """Tokens that running `node` once computes, and those they attend to: the next step's for the denoiser, image
    tokens for the VAE, text tokens for the text encoder.
    """
    num_rows = request.edit.sampling.num_rows
    match node.stage:
        case "denoise":
            return Work.of_pairs([(request.num_step_tokens, request.num_all_tokens)] * num_rows)
        case "text_encode":
            return Work.of([request.edit.num_text_tokens] * num_rows)
        case "image_encode" | "decode":
            return Work.of([request.edit.num_tokens])


def _inputs(request: Request, node: Node, placement: Placement) -> tuple[TensorRef, ...]:
    keys = (TensorKey(request.id, edge.source, edge.name) for edge in node.inputs)
    return tuple(TensorRef(key, placement[key.node], handle=request.exported.get(key)) for key in keys)


def _prime(job: PrimingJob, chunk: Chunk, sigma: float, pages: PageReservations, pixels: ArrayRef | None) -> Prime:
    template = job.template
    return Prime(
        latents=pages.latents(template),
        content_id=template.content_id,
        sigma=sigma,
        width=template.width,
        height=template.height,
        prompt=template.scheme.prompt,
        max_sequence_length=template.max_text_tokens,
        guidance_scale=template.scheme.guidance_scale,
        blocks=chunk.blocks,
        dtype=template.scheme.layout.dtype,
        out=pages.ref(template, sigma),
        template=pixels,
        cache_salt=template.cache_salt,
    )


def _work(request: Request, node: Node, pages: PageReservations) -> StageWork:
    match node.stage:
        case "text_encode":
            return _text_encode(request)
        case "image_encode":
            return _image_encode(request)
        case "denoise":
            return _denoise(request, pages)
        case "decode":
            return _decode(request, node, pages)


def _text_encode(request: Request) -> TextEncode:
    edit = request.edit
    return TextEncode(
        prompt=edit.prompt,
        max_sequence_length=edit.max_text_tokens,
        negative_prompt=edit.sampling.negative_prompt,
        template=edit.template,
        content_id=edit.content_id,
        cache_salt=edit.cache_salt,
    )


def _image_encode(request: Request) -> ImageEncode:
    edit, sampling = request.edit, request.edit.sampling
    assert sampling.seed is not None
    assert sampling.num_inference_steps is not None
    return ImageEncode(
        template=edit.template,
        mask=edit.mask,
        width=edit.width,
        height=edit.height,
        seed=sampling.seed,
        num_inference_steps=sampling.num_inference_steps,
        num_denoising_steps=sampling.num_denoising_steps,
    )


def _denoise(request: Request, pages: PageReservations) -> Denoise:
    edit, progress = request.edit, request.progress
    assert edit.sampling.guidance_scale is not None
    step = progress.steps_scheduled
    reservation = request.reservation if request.is_masked_step(step) else None
    return Denoise(
        step=step,
        num_inference_steps=progress.num_steps,
        width=edit.width,
        height=edit.height,
        active=edit.active if reservation else None,
        guidance_scale=edit.sampling.guidance_scale,
        true_cfg_scale=edit.sampling.true_cfg_scale or 1.0,
        keep_clean=progress.is_preview_next,
        pages=pages.span(reservation, request.sigmas[step], may_load=True) if reservation else None,
        full_blocks=reservation.full_blocks if reservation else (),
        template=pages.latents(reservation.template) if reservation else None,
        content_id=edit.content_id,
        cache_salt=edit.cache_salt,
    )


def _decode(request: Request, node: Node, pages: PageReservations) -> Decode:
    edit, index = request.edit, request.progress.pending_preview
    is_preview = node.kind == "side"
    assert not is_preview or index is not None
    return Decode(
        width=edit.width,
        height=edit.height,
        partial=is_preview,
        pixels=edit.pixels[index] if is_preview and index is not None else edit.pixels[-1],
        active=edit.active if request.reservation else None,
        template_latents=pages.latents(request.reservation.template) if request.reservation else None,
        template=edit.template if request.reservation else None,
    )
