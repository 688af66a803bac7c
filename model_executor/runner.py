"""Batch -> tensors -> forward -> BatchResult: what a worker computes, apart from its process.

The runner keeps nothing per request: inputs are named by the plan and lie in the tensor store, and so do outputs. A
stage that works on one item at a time isolates failures: only the item fails. One denoising step is one forward pass
for all items, so it fails as a whole and leaves every item's latents as they were.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import OutOfMemoryError
from core.failure import Failure
from core.handles import ArrayRef, TensorKey
from core.messages import (
    Batch,
    BatchResult,
    Decode,
    Denoise,
    ImageEncode,
    Item,
    ItemResult,
    TextEncode,
)
from model_executor.models.base import Family, Row
from model_executor.sampling import advance, predict_clean
from model_executor.tensor_store import SharedMemory, TensorStore

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""How PyTorch's CPU allocator words it, in a plain RuntimeError."""


class Runner:
    """Runs batches of one worker. `models` maps a model's name to its family, whose components are loaded by the
    worker."""

    def __init__(self, rank: int, models: Mapping[str, Family], store: TensorStore, arena: SharedMemory) -> None:
        self._rank = rank
        self._models = models
        self._store = store
        self._arena = arena

    @torch.inference_mode()
    def run(self, batch: Batch) -> BatchResult:
        """Never raises for what a batch contains: an item that fails carries its Failure."""
        started = time.monotonic()
        family = self._models[batch.model.model]
        if batch.stage == "denoise":
            results = self._attempt(family, batch.items)
        else:
            results = [result for item in batch.items for result in self._attempt(family, [item])]
        seconds = time.monotonic() - started
        return BatchResult(batch_id=batch.id, rank=self._rank, started=started, seconds=seconds, items=tuple(results))

    def _attempt(self, family: Family, items: Sequence[Item]) -> list[ItemResult]:
        """The results of items that succeed or fail together."""
        try:
            return self._compute(family, items)
        except Exception as error:  # the actor's edge: whatever went wrong becomes a message to those who wait
            failure = Failure.of(_named(error), traceback.format_exc())
            return [ItemResult(item.request_id, item.node, failure=failure) for item in items]

    def _compute(self, family: Family, items: Sequence[Item]) -> list[ItemResult]:
        match items[0].work:
            case TextEncode() as work:
                return [self._encode_text(family, items[0], work)]
            case ImageEncode() as work:
                return [self._encode_image(family, items[0], work)]
            case Decode() as work:
                return [self._decode(family, items[0], work)]
            case Denoise():
                return self._denoise(family, items)

    def _encode_text(self, family: Family, item: Item, work: TextEncode) -> ItemResult:
        text = family.encode_text(work.prompt, work.max_sequence_length)
        named = {"prompt_embeds": text.prompt_embeds, "pooled_prompt_embeds": text.pooled_prompt_embeds}
        return self._put(item, named, text_tokens=text.num_tokens, prompt_truncated=text.truncated)

    def _encode_image(self, family: Family, item: Item, work: ImageEncode) -> ItemResult:
        image = family.encode_image(
            self._shared(work.template),
            self._shared(work.mask),
            seed=work.seed,
            num_inference_steps=work.num_inference_steps,
            num_denoising_steps=work.num_denoising_steps,
        )
        return self._put(item, {"latents": image.latents, "condition": image.condition, "sigmas": image.sigmas})

    def _decode(self, family: Family, item: Item, work: Decode) -> ItemResult:
        (latents,) = (self._store.resolve(ref) for ref in item.inputs)
        self._shared(work.pixels).copy_(family.decode(latents, work.width, work.height))
        return ItemResult(item.request_id, item.node)

    def _denoise(self, family: Family, items: Sequence[Item]) -> list[ItemResult]:
        """predict, combine guidance, advance; only then is anything stored."""
        steps = [self._step(family, item) for item in items]
        velocities = [family.combine_guidance([velocity]) for velocity in family.predict([s.row for s in steps])]
        outputs = [step.outputs(velocity) for step, velocity in zip(steps, velocities, strict=True)]
        return [self._put_step(item, named) for item, named in zip(items, outputs, strict=True)]

    def _step(self, family: Family, item: Item) -> _Step:
        work, inputs = item.work, {ref.key.name: self._store.resolve(ref) for ref in item.inputs}
        assert isinstance(work, Denoise)
        row = Row(
            latents=inputs["latents"],
            condition=inputs["condition"],
            prompt_embeds=inputs["prompt_embeds"],
            pooled_prompt_embeds=inputs["pooled_prompt_embeds"],
            sigma=inputs["sigmas"][work.step],
            guidance_scale=work.guidance_scale,
            grid=family.grid(work.width, work.height),
            active=None if work.active is None else self._shared(work.active).long().to(inputs["latents"].device),
        )
        return _Step(row, inputs["sigmas"][work.step + 1], work.keep_clean)

    def _put_step(self, item: Item, named: Mapping[str, Tensor]) -> ItemResult:
        """Replace the latents where they were read from; the clean prediction belongs to this node."""
        source = next(ref.key for ref in item.inputs if ref.key.name == "latents")
        keys = {"latents": source, "clean": TensorKey(item.request_id, item.node, "clean")}
        refs = tuple(self._store.put(keys[name], tensor) for name, tensor in named.items())
        return ItemResult(item.request_id, item.node, refs)

    def _put(
        self, item: Item, named: Mapping[str, Tensor], *, text_tokens: int = 0, prompt_truncated: bool = False
    ) -> ItemResult:
        refs = [self._store.put(TensorKey(item.request_id, item.node, name), t) for name, t in named.items()]
        return ItemResult(item.request_id, item.node, tuple(refs), text_tokens, prompt_truncated)

    def _shared(self, ref: ArrayRef) -> Tensor:
        """A tensor over shared memory, without a copy."""
        return torch.from_numpy(self._arena.view(ref))


@dataclass(frozen=True, slots=True)
class _Step:
    """One request's denoising step: what goes in, and how its velocity moves the sampler's state."""

    row: Row
    next_sigma: Tensor
    keep_clean: bool

    def outputs(self, velocity: Tensor) -> dict[str, Tensor]:
        """`latents` after the step and, if asked for, `clean`; tokens that are not active stay as they are."""
        row = self.row
        here = row.latents if row.active is None else row.latents[row.active]
        named = {"latents": self._whole(advance(here, velocity, row.sigma, self.next_sigma))}
        if self.keep_clean:
            named["clean"] = self._whole(predict_clean(here, velocity, row.sigma))
        return named

    def _whole(self, moved: Tensor) -> Tensor:
        row = self.row
        return moved if row.active is None else row.latents.index_copy(0, row.active, moved)


def _named(error: Exception) -> Exception:
    """PyTorch's out-of-memory errors as ours; any other as it is."""
    is_memory = isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    )
    return OutOfMemoryError("the device has no room for this request") if is_memory else error
