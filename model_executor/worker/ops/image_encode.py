"""Runs the op image_encode."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from core.errors import RunError
from core.messages.worker import Item, ItemResult
from core.scheduling.ops.image_encode import ImageEncode
from model_executor.models.base import ImageInputs
from model_executor.worker.ops.context import WorkerContext


def encode_image(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Encode one item's template, references and mask, and draw its noise. Its inputs, if there are any, are what
    sampling starts from instead of the template, the mask, and a picture as its template.
    """
    (item,) = items
    work = item.work
    assert isinstance(work, ImageEncode)
    given, size = {ref.input: context.read(ref) for ref in item.inputs}, (work.width, work.height)
    inputs = ImageInputs(
        template=_template(item, given["picture"]) if "picture" in given else context.picture(work.template, *size),
        is_empty=work.template is None and "picture" not in given,
        mask=_fitted(given["mask"], work) if "mask" in given else context.mask(work.mask, *size),
        seed=work.seed,
        num_inference_steps=work.num_inference_steps,
        num_denoising_steps=work.num_denoising_steps,
        shift=work.shift,
        sigmas=work.sigmas,
        part=(work.begin, work.end),
        start=given.get("start"),
        is_exact=work.is_exact,
        cache_salt=work.cache_salt,
        references=[context.shared(reference) for reference in work.references],
        paged_reference_tokens=work.paged_reference_tokens,
        num_controls=work.num_controls,
        noise_first=work.noise_first,
        index=work.index,
        number=work.number,
        starts_over=work.starts_over,
        is_recalled=work.is_recalled,
    )
    image = context.models[item.model].encode_image(inputs)
    sigmas = _computed(image.sigmas, work)
    named = {"latents": image.latents, "condition": image.condition, "outside": image.outside, "sigmas": sigmas}
    tensors = context.put(item, named) + context.put_state(item, image.state)
    return [ItemResult(item.request_id, item.node, tensors, sigmas=tuple(sigmas.tolist()))]


def _template(item: Item, picture: Tensor) -> Tensor:
    """A picture that another node has made. Raises RunError if it is not of the size of the pass."""
    assert isinstance(item.work, ImageEncode)
    height, width, _ = picture.shape
    if (width, height) != (item.work.width, item.work.height):
        wanted = f"{item.work.width} x {item.work.height}"
        raise RunError.at(item.node, f"its picture is {width} x {height} px, and {wanted} px are encoded")
    return picture.cpu()


def _fitted(mask: Tensor, work: ImageEncode) -> Tensor:
    """A found mask at the size of a pass, which may be smaller than the picture: a pixel belongs to it if half of what
    it covers does, or if that leaves nothing, any of that."""
    if mask.shape == (work.height, work.width):
        return mask.cpu()
    shares = adaptive_avg_pool2d(mask[None, None].float().cpu(), (work.height, work.width))
    fitted = shares[0, 0] >= 0.5
    return (fitted if fitted.any() else shares[0, 0] > 0).byte()


def _computed(sigmas: Tensor, work: ImageEncode) -> Tensor:
    """The noise levels of the computed steps, and that after the last. Which model call belongs to which step is known
    of samplers with one call per step only, and others compute all steps.
    """
    if len(work.computed_steps) == work.num_denoising_steps:
        return sigmas
    return sigmas[[*work.computed_steps, -1]]
