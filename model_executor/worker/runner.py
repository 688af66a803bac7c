"""Runner: computes a worker's batches. Batch -> tensors -> forward pass -> BatchResult.

The runner has no state per request: inputs and outputs are named by the plan and lie in the tensor store. Most stages
compute one item at a time, so an error fails that item only. Denoising steps and priming chunks compute all items in
one forward pass, which fails as a whole and is then tried in halves (`attempt_in_halves`).

A pass that fails leaves nothing behind, so it can be repeated. Steps store new tensors only after all are computed.
Pages and pixels, which are written in place, are not read before the result reports them done, and the next attempt
writes them from the start. What is computed once for all steps (modulation, active tokens, a prompt's embedding) is
stored when complete, and does not depend on anything that changes.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from core.failure import Failure
from core.handles import ArrayRef, EntryRef, TensorKey
from core.ipc.logs import of_request
from core.messages.worker import (
    Batch,
    BatchResult,
    Decode,
    Denoise,
    EncodeTemplate,
    ImageEncode,
    Item,
    ItemResult,
    PageSpan,
    Prime,
    TextEncode,
)
from core.scheduling.halving import attempt_in_halves
from model_executor.models.base import Family, PrimeRow, Row, Sample
from model_executor.models.boxes import Box, around
from model_executor.page_cache.page_store import PageStore
from model_executor.page_cache.pages import Pages
from model_executor.samplers.sampling import State
from model_executor.worker.device_failures import free_memory, our_error, wait_for_device
from model_executor.worker.prompt_cache import PromptCache
from model_executor.worker.tensor_store import SharedMemory, TensorStore

logger = logging.getLogger("stencil.worker")

TOGETHER = ("denoise", "prime")
"""Stages whose items share one forward pass."""

_NONE: Mapping[str, str] = MappingProxyType({})


class Runner:
    """Runs the batches of one worker. models: name -> family, whose components the worker loads. prompts_of: adapter ->
    the model with the same text encoders, whose prompt cache it shares."""

    def __init__(
        self,
        rank: int,
        models: Mapping[str, Family],
        store: TensorStore,
        arena: SharedMemory,
        pages: PageStore,
        prompts_of: Mapping[str, str] = _NONE,
    ) -> None:
        self._rank = rank
        self._models = models
        prompts = {name: PromptCache(family) for name, family in models.items() if name not in prompts_of}
        self._prompts = {name: prompts[prompts_of.get(name, name)] for name in models}
        self._dtypes = {name: getattr(torch, family.info(name).dtype) for name, family in models.items()}
        self._store = store
        self._arena = arena
        self._pages = pages

    @torch.inference_mode()
    def run(self, batch: Batch) -> BatchResult:
        """Run a batch. Items that fail carry their Failure in the result. Raises only errors of a broken device, on
        which everything would fail."""
        started = time.monotonic()
        attempt = partial(self._attempt, batch.model.model)
        groups = [batch.items] if batch.stage in TOGETHER else [(item,) for item in batch.items]
        done = [attempt_in_halves(group, attempt, free_memory) for group in groups]
        return BatchResult(
            batch_id=batch.id,
            rank=self._rank,
            started=started,
            seconds=time.monotonic() - started,
            items=tuple(result for results, _ in done for result in results),
            num_parts=1 + sum(num_parts - 1 for _, num_parts in done),
        )

    def _attempt(self, model: str, items: Sequence[Item]) -> list[ItemResult] | Failure:
        """The results of items that succeed or fail together. After a failure nothing refers to what was computed.
        Raises if the device itself is broken: after a failed kernel all later ones fail, and only a new process helps.
        """
        try:
            results = self._compute(model, items)
            wait_for_device()  # results contain the time taken, and a failed kernel raises only here
            return results
        except Exception as error:  # the outermost handler: every failure becomes a message to the waiting requests
            failure, cause = Failure.of(our_error(error), traceback.format_exc()), f"{type(error).__name__}: {error}"
        names = ", ".join(item.request_id for item in items)
        logger.warning("%s of %s failed: %s", items[0].node, names, cause, extra=of_request(""))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return failure

    def _compute(self, model: str, items: Sequence[Item]) -> list[ItemResult]:
        family = self._models[model]
        match items[0].work:
            case TextEncode() as work:
                return [self._encode_text(model, items[0], work)]
            case ImageEncode() as work:
                return [self._encode_image(family, items[0], work)]
            case EncodeTemplate() as work:
                return [self._encode_template(family, items[0], work)]
            case Decode() as work:
                return [self._decode(model, items[0], work)]
            case Prime():
                return self._prime(model, items)
            case Denoise():
                return self._denoise(model, items)

    def _encode_text(self, model: str, item: Item, work: TextEncode) -> ItemResult:
        prompts = [work.prompt] if work.negative_prompt is None else [work.prompt, work.negative_prompt]
        picture = (work.content_id, None if work.template is None else self._shared(work.template))
        cache, length = self._prompts[model], work.max_sequence_length
        texts = [cache.encode(prompt, length, *picture, work.cache_salt) for prompt in prompts]
        named = {
            "prompt_embeds": _below([text.prompt_embeds for text in texts]),
            "text_lengths": torch.tensor([len(text.prompt_embeds) for text in texts]),
            "pooled_prompt_embeds": _rows([text.pooled_prompt_embeds for text in texts]),
        }
        return self._put(item, named, text_tokens=texts[0].num_tokens, prompt_truncated=texts[0].truncated)

    def _encode_image(self, family: Family, item: Item, work: ImageEncode) -> ItemResult:
        image = family.encode_image(
            self._shared(work.template),
            self._shared(work.mask),
            seed=work.seed,
            num_inference_steps=work.num_inference_steps,
            num_denoising_steps=work.num_denoising_steps,
        )
        self._store.put_series(TensorKey(item.request_id, item.node, "sampler"), image.state)
        names = ("latents", "condition", "outside", "sigmas")
        return self._put(item, {name: getattr(image, name) for name in names}, sigmas=tuple(image.sigmas.tolist()))

    def _encode_template(self, family: Family, item: Item, work: EncodeTemplate) -> ItemResult:
        clean = family.encode_template(self._shared(work.template))
        self._pages.create(work.out).copy_(clean.contiguous().view(torch.uint8).flatten())
        return ItemResult(item.request_id, item.node)

    def _decode(self, model: str, item: Item, work: Decode) -> ItemResult:
        (latents,) = (self._store.resolve(ref) for ref in item.inputs)
        family, pixels = self._models[model], self._shared(work.pixels)
        if work.active is None:
            pixels.copy_(family.decode(latents, work.width, work.height))
            return ItemResult(item.request_id, item.node)
        assert work.template is not None
        assert work.template_latents is not None
        active, template = self._shared(work.active).long().to(latents.device), self._shared(work.template)
        whole = self._clean(model, work.template_latents, latents.shape[0]).to(latents.device, copy=True)
        whole[active] = latents[active].to(whole.dtype)  # float32 if another rank has exported them
        region, (left, top, right, bottom) = family.decode_region(whole, active, work.width, work.height)
        pixels.copy_(template)
        pixels[top:bottom, left:right] = region
        return ItemResult(item.request_id, item.node)

    # ------------------------------------------------------------------------------------------------ priming

    def _prime(self, model: str, items: Sequence[Item]) -> list[ItemResult]:
        """Prime one chunk: all keyframes of the batch through the same blocks. Stores hidden states for the next."""
        works = [work for item in items if isinstance(work := item.work, Prime)]
        rows = [self._prime_row(model, item, work) for item, work in zip(items, works, strict=True)]
        hidden = self._models[model].prime(rows, works[0].blocks)
        for item, work, tensors in zip(items, works, hidden, strict=True):
            self._store.put_series(_hidden_key(item, work), tensors)
        return [ItemResult(item.request_id, item.node) for item in items]

    def _prime_row(self, model: str, item: Item, work: Prime) -> PrimeRow:
        family, cache = self._models[model], self._prompts[model]
        template = None if work.template is None else self._shared(work.template)
        text = cache.encode(work.prompt, work.max_sequence_length, work.content_id, template, work.cache_salt)
        grid = family.grid(work.width, work.height)
        sigma = torch.tensor(work.sigma, dtype=torch.float32, device=text.prompt_embeds.device)
        clean = self._clean(model, work.latents, grid[0] * grid[1])
        latents, condition = family.prime_inputs(clean, _noise_id(work), sigma)
        is_first = work.blocks[0] == 0
        return PrimeRow(
            latents=latents,
            condition=condition,
            prompt_embeds=text.prompt_embeds,
            pooled_prompt_embeds=text.pooled_prompt_embeds,
            sigma=sigma,
            guidance_scale=work.guidance_scale,
            grid=grid,
            hidden=None if is_first else self._store.get_series(_hidden_key(item, work)),
            entry=self._pages.create(work.out) if is_first else self._pages.entry(work.out),
        )

    def _clean(self, model: str, ref: EntryRef, num_tokens: int) -> Tensor:
        """A template's clean latents, [image tokens, latent width], read-only."""
        return self._pages.entry(ref).view(self._dtypes[model]).view(num_tokens, -1)

    # ------------------------------------------------------------------------------------------------ denoising

    def _denoise(self, model: str, items: Sequence[Item]) -> list[ItemResult]:
        """Predict, combine guidance, advance; results are stored only after all three."""
        family = self._models[model]
        steps = [self._step(model, item) for item in items]
        predictions = iter(family.predict([row for step in steps for row in step.rows]))
        guided = [family.combine_guidance([next(predictions) for _ in step.rows], step.scale) for step in steps]
        outputs = [step.outputs(family, prediction) for step, prediction in zip(steps, guided, strict=True)]
        return [self._put_step(item, *output) for item, output in zip(items, outputs, strict=True)]

    def _step(self, model: str, item: Item) -> _Step:
        work, inputs = item.work, {ref.key.name: self._store.resolve(ref) for ref in item.inputs}
        assert isinstance(work, Denoise)
        family = self._models[model]
        grid, sigma = family.grid(work.width, work.height), inputs["sigmas"][work.step]
        sample = Sample(
            latents=inputs["latents"],
            outside=inputs["outside"],
            sigmas=inputs["sigmas"],
            step=work.step,
            state=self._store.get_series(_sampler_key(item)),
            grid=grid,
        )
        latents, condition = family.denoiser_input(sample), inputs["condition"]
        active, box = (None, None) if work.active is None else self._active(item, work.active, grid, latents.device)
        if active is not None and (work.full_blocks or family.sees_all_latents):
            latents, condition = self._fill_inactive(model, work, sigma, active, latents, condition)
        lengths = inputs["text_lengths"].long().tolist()
        prompts = zip(inputs["prompt_embeds"].split(lengths), inputs["pooled_prompt_embeds"], strict=True)
        pages = None if work.pages is None else self._page_span(family, work, work.pages)
        rows = [
            Row(
                latents=latents,
                condition=condition,
                prompt_embeds=embeds,
                pooled_prompt_embeds=pooled,
                sigma=sigma,
                guidance_scale=work.guidance_scale,
                grid=grid,
                active=active,
                box=box,
                pages=pages,
                full_blocks=work.full_blocks,
                modulation=self._modulation(family, item, work, (number, len(lengths)), pooled, inputs["sigmas"]),
            )
            for number, (embeds, pooled) in enumerate(prompts)
        ]
        return _Step(rows, sample, work.true_cfg_scale, work.keep_clean)

    def _modulation(
        self, family: Family, item: Item, work: Denoise, row: tuple[int, int], pooled: Tensor, sigmas: Tensor
    ) -> Tensor | None:
        """The row of the family's modulation table for this step, None if it keeps no table. row: (index, count) of the
        request's rows. The table is computed for the whole run at its first step."""
        number, num_rows = row
        key = TensorKey(item.request_id, item.node, f"modulation-{number}")
        if not (kept := self._store.get_series(key)):
            table = family.modulation(pooled, work.guidance_scale, sigmas[:-1], num_rows)
            kept = () if table is None else (table,)
            self._store.put_series(key, kept)
        return kept[0][work.step : work.step + 1] if kept else None

    def _fill_inactive(
        self, model: str, work: Denoise, sigma: Tensor, active: Tensor, latents: Tensor, condition: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Latents and condition in which inactive tokens are replaced by the template's, as in priming."""
        assert work.template is not None
        clean = self._clean(model, work.template, latents.shape[0])
        primed, own = self._models[model].prime_inputs(clean, _noise_id(work), sigma), (latents, condition)
        filled = [its.index_copy(0, active, mine[active]) for its, mine in zip(primed, own, strict=True)]
        return filled[0], filled[1]

    def _page_span(self, family: Family, work: Denoise, span: PageSpan) -> Pages:
        """The pages of a step. Entries still being loaded are copied in the order that the step reads their blocks."""
        rows, columns = family.grid(work.width, work.height)
        refs = [span.near] if span.far is None else [span.near, span.far]
        coming = [ref.key for ref in refs if self._pages.is_loading(ref.key)]
        for key in coming:
            self._pages.put_last(key, work.full_blocks)
        near, *far = (self._pages.entry(ref) for ref in refs)
        return Pages(
            layout=family.page_layout(span.dtype),
            num_tokens=rows * columns,
            near=near,
            far=far[0] if far else None,
            weight=span.weight,
            wait=partial(self._await_pages, coming) if coming else None,
        )

    def _await_pages(self, keys: Sequence[str], block: int) -> None:
        """Wait until a block of these entries may be read."""
        for key in keys:
            self._pages.wait_block(key, block)

    def _active(self, item: Item, ref: ArrayRef, grid: tuple[int, int], device: torch.device) -> tuple[Tensor, Box]:
        """Token indices, int64 on the device, and the box around them, found on the host. Computed at the run's first
        step only: uploading waits for a GPU, and finding the box takes time."""
        key = TensorKey(item.request_id, item.node, "active")
        if not (kept := self._store.get_series(key)):
            tokens = self._shared(ref).long()
            kept = (tokens.to(device), torch.tensor(around(tokens, grid[1])))
            self._store.put_series(key, kept)
        active, (left, top, right, bottom) = kept[0], kept[1].tolist()
        return active, (left, top, right, bottom)

    def _put_step(self, item: Item, named: Mapping[str, Tensor], state: State) -> ItemResult:
        """Store a step's results: latents and sampler state replace those that were read, the clean prediction belongs
        to this node."""
        keys = {"latents": _latents_key(item), "clean": TensorKey(item.request_id, item.node, "clean")}
        self._store.put_series(_sampler_key(item), state)
        refs = tuple(self._store.put(keys[name], tensor) for name, tensor in named.items())
        return ItemResult(item.request_id, item.node, refs)

    def _put(
        self,
        item: Item,
        named: Mapping[str, Tensor],
        *,
        text_tokens: int = 0,
        prompt_truncated: bool = False,
        sigmas: tuple[float, ...] = (),
    ) -> ItemResult:
        refs = [self._store.put(TensorKey(item.request_id, item.node, name), t) for name, t in named.items()]
        return ItemResult(item.request_id, item.node, tuple(refs), text_tokens, prompt_truncated, sigmas)

    def _shared(self, ref: ArrayRef) -> Tensor:
        """A tensor over an array in shared memory, without a copy."""
        return torch.from_numpy(self._arena.view(ref))


@dataclass(frozen=True, slots=True)
class _Step:
    """One request's denoising step: its inputs, and how its prediction advances the sampler."""

    rows: Sequence[Row]  # one for each prompt
    sample: Sample
    scale: float  # of classifier-free guidance, for two rows
    keep_clean: bool  # whether to output the clean prediction too, for a preview

    def outputs(self, family: Family, prediction: Tensor) -> tuple[dict[str, Tensor], State]:
        """(`latents` after the step and, with keep_clean, `clean`; the sampler's state). Tokens that are not active are
        unchanged. prediction: of the active tokens."""
        sample, active = self.sample, self.rows[0].active
        if active is not None:
            prediction = prediction.new_zeros(sample.latents.shape).index_copy_(0, active, prediction)
        moved, state = family.advance(sample, prediction)
        named = {"latents": self._of_active(moved)}
        if self.keep_clean:
            named["clean"] = self._of_active(family.predict_clean(sample, prediction))
        return named, state

    def _of_active(self, moved: Tensor) -> Tensor:
        latents, active = self.sample.latents, self.rows[0].active
        return moved if active is None else latents.index_copy(0, active, moved[active])


def _below(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors concatenated along rows; a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _rows(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors stacked, one row each; a view of a single one."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def _latents_key(item: Item) -> TensorKey:
    """The key of a denoising step's latents."""
    return next(ref.key for ref in item.inputs if ref.key.name == "latents")


def _sampler_key(item: Item) -> TensorKey:
    """The key of the sampler's state, which is stored beside the latents."""
    latents = _latents_key(item)
    return TensorKey(latents.request_id, latents.node, "sampler")


def _noise_id(work: Prime | Denoise) -> str:
    """The key of a template's cached noise. The content id alone seeds it; the salt keeps owners apart."""
    return work.content_id + work.cache_salt


def _hidden_key(item: Item, work: Prime) -> TensorKey:
    """The key of a keyframe's hidden state between chunks."""
    return TensorKey(item.request_id, item.node, f"hidden-{work.sigma}")
