"""What a node of the stage graph means for one request: the work message and the tensors it reads."""

from __future__ import annotations

from core.handles import TensorKey, TensorRef
from core.messages import (
    Decode,
    Denoise,
    ImageEncode,
    Item,
    StageWork,
    TextEncode,
)
from core.request import Request
from core.stages import Node, Placement


def make_item(request: Request, node: Node, placement: Placement) -> Item:
    """The request's part of a batch that runs `node` next."""
    return Item(request.id, node.name, _work(request, node), _inputs(request, node, placement))


def exports_needed(request: Request, node: Node, placement: Placement) -> list[TensorKey]:
    """Inputs of `node` that were made on another rank and are not in shared memory yet."""
    keys = [
        TensorKey(request.id, edge.source, edge.name)
        for edge in node.inputs
        if placement[edge.source] != placement[node.name]
    ]
    return [key for key in keys if key not in request.exported]


def work_tokens(request: Request, node: Node) -> int:
    """Tokens that running `node` once costs: those of a step for the denoiser, image tokens for the VAE, text tokens
    else.
    """
    match node.stage:
        case "denoise":
            return request.num_step_tokens
        case "text_encode":
            return request.edit.max_text_tokens
        case "image_encode" | "decode":
            return request.edit.num_tokens


def _inputs(request: Request, node: Node, placement: Placement) -> tuple[TensorRef, ...]:
    keys = (TensorKey(request.id, edge.source, edge.name) for edge in node.inputs)
    return tuple(TensorRef(key, placement[key.node], handle=request.exported.get(key)) for key in keys)


def _work(request: Request, node: Node) -> StageWork:
    match node.stage:
        case "text_encode":
            return _text_encode(request)
        case "image_encode":
            return _image_encode(request)
        case "denoise":
            return _denoise(request)
        case "decode":
            return _decode(request, node)


def _text_encode(request: Request) -> TextEncode:
    return TextEncode(prompt=request.edit.prompt, max_sequence_length=request.edit.max_text_tokens)


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


def _denoise(request: Request) -> Denoise:
    edit, progress = request.edit, request.progress
    assert edit.sampling.guidance_scale is not None
    step = progress.steps_scheduled
    preview_due = progress.preview_index(step + 1) is not None
    return Denoise(
        step=step,
        num_inference_steps=progress.num_steps,
        width=edit.width,
        height=edit.height,
        active=None,
        guidance_scale=edit.sampling.guidance_scale,
        keep_clean=preview_due and not progress.is_preview_out,
    )


def _decode(request: Request, node: Node) -> Decode:
    edit, index = request.edit, request.progress.pending_preview
    is_preview = node.kind == "side"
    assert not is_preview or index is not None
    return Decode(
        width=edit.width,
        height=edit.height,
        partial=is_preview,
        pixels=edit.pixels[index] if is_preview and index is not None else edit.pixels[-1],
    )
