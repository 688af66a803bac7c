"""Runs the op denoise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from core.failure import Failure
from core.handles import ArrayRef, TensorKey
from core.ipc.logs import of_request
from core.messages.worker import Item, ItemResult, PageSpan
from core.page_scheme import OWN_PAGES_DTYPE
from core.scheduling.ops.denoise import Denoise
from model_executor.kernels.gpu_tables import upload
from model_executor.models.base import Family, ModulationInputs, Row, SamplingState
from model_executor.models.boxes import Box, around
from model_executor.page_cache.own_pages import OwnPages
from model_executor.page_cache.pages import Pages
from model_executor.samplers.sampling import State
from model_executor.worker.ops.context import WorkerContext, noise_id
from model_executor.worker.stores.tensor_store import MissingValueError

logger = logging.getLogger("stencil.worker")

TABLES = ("active", "template", "modulation-0", "modulation-1", "keys-values-0", "keys-values-1")
OWN_PAGES = ("pages-0", "pages-1")
"""What this rank keeps from the first step of a loop to its last: names in the tensor store. Those with a number are of
this row of a request."""


def denoise(context: WorkerContext, model: str, items: Sequence[Item]) -> list[ItemResult]:
    """Predict, combine guidance, advance; results are stored only after all three. An item whose inputs were never made
    fails alone, or on several ranks with the others: they could not go on with the same rows.
    """
    family, group = context.models[model], context.group
    context.pages.begin_step()
    read = [_read(context, model, item) if group is None else _step(context, model, item) for item in items]
    steps = [step for step in read if isinstance(step, _Step)]
    predictions = iter(family.predict([row for step in steps for row in step.rows], group) if steps else ())
    guided = [family.combine_guidance([next(predictions) for _ in step.rows], step.scale) for step in steps]
    outputs = iter([step.outputs(family, prediction) for step, prediction in zip(steps, guided, strict=True)])
    return [
        ItemResult(item.request_id, item.node, failure=step)
        if isinstance(step, Failure)
        else _put_step(context, item, *next(outputs), is_last=step.is_last)
        for item, step in zip(items, read, strict=True)
    ]


def _read(context: WorkerContext, model: str, item: Item) -> _Step | Failure:
    try:
        return _step(context, model, item)
    except MissingValueError as error:
        logger.warning("%s of %s: an earlier step failed", item.node, item.request_id, extra=of_request(""))
        return Failure("engine", f"an earlier step failed: {error.args[0]}")


def _step(context: WorkerContext, model: str, item: Item) -> _Step:
    refs = {ref.input: ref for ref in item.inputs}
    work, state = item.work, context.read_series(refs.pop("sampler"))
    inputs = {name: context.read(ref) for name, ref in refs.items()}
    assert isinstance(work, Denoise)
    last: tuple[Tensor, ...] = ()  # of a request with its own pages, after its first step
    if work.own_page_step is not None and work.step:
        state, last = state[:-2], state[-2:]
    family = context.family(model, work.patches)
    grid, sigma = family.grid(work.width, work.height), inputs["sigmas"][work.step]
    sample = SamplingState(
        latents=inputs["latents"],
        outside=inputs["outside"],
        sigmas=inputs["sigmas"],
        step=work.step,
        state=state,
        grid=grid,
    )
    latents, condition = family.denoiser_input(sample), inputs["condition"]
    active, box = (None, None) if work.active is None else _active(context, item, work.active, grid, latents.device)
    if active is not None and (work.full_blocks or family.sees_all_latents):
        template = _template(context, model, item, work, len(latents))
        primed = family.prime_inputs(*template, sigma)  # as the template's pages are
        latents, condition = (
            its.index_copy(0, active, own[active]) for its, own in zip(primed, (latents, condition), strict=True)
        )
    prompts = _prompts(inputs) if work.class_label is None else _classes(family, work, work.class_label)
    pages = None if work.pages is None else _page_span(context, family, work, work.pages)
    tables = [
        _modulation(context, family, item, work, (number, len(prompts)), pooled, inputs["sigmas"])
        for number, (_, pooled) in enumerate(prompts)
    ]
    keys_values = [
        _once(context, item, f"keys-values-{number}", partial(family.keys_values, embeds, work.patches))
        for number, (embeds, _) in enumerate(prompts)
    ]
    own: Sequence[OwnPages | None] = [None] * len(prompts)
    if work.own_page_step is not None:
        before = latents if work.own_page_step == work.step else last[0]
        own = [
            _own_pages(context, family, item, work, number, before, inputs["sigmas"], table)
            for number, table in enumerate(tables)
        ]
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
            pages=mine.pages if mine is not None and active is not None else pages,
            own=mine,
            full_blocks=work.full_blocks,
            patches=work.patches,
            modulation=None if table is None else table[work.step : work.step + 1],
            keys_values=known,
        )
        for (embeds, pooled), table, known, mine in zip(prompts, tables, keys_values, own, strict=True)
    ]
    return _Step(rows, sample, work.true_cfg_scale, work.keep_clean, last[1] if last else None)


def _prompts(inputs: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(prompt_embeds, pooled_prompt_embeds) of each row, as the text encoder has made them. The lengths are in host
    memory."""
    lengths = inputs["text_lengths"].long().tolist()
    return list(zip(inputs["prompt_embeds"].split(lengths), inputs["pooled_prompt_embeds"], strict=True))


def _classes(family: Family, work: Denoise, label: int) -> list[tuple[Tensor, Tensor]]:
    """The same of a class, with guidance followed by any class."""
    labels = [label] if work.true_cfg_scale <= 1.0 else [label, None]
    return [(each.prompt_embeds, each.pooled_prompt_embeds) for each in map(family.encode_class, labels)]


def _modulation(
    context: WorkerContext,
    family: Family,
    item: Item,
    work: Denoise,
    row: tuple[int, int],
    pooled: Tensor,
    sigmas: Tensor,
) -> Tensor | None:
    """The family's modulation table of a row, None if it keeps none. row: (index, count) of the request's rows."""
    number, num_rows = row
    inputs = ModulationInputs(pooled, work.guidance_scale, sigmas[:-1], num_rows, work.patches)
    return _once(context, item, f"modulation-{number}", partial(family.modulation, inputs))


def _once(context: WorkerContext, item: Item, name: str, make: Callable[[], Tensor | None]) -> Tensor | None:
    """What `make` computes for the whole run at its first step; None if it makes nothing. name: one of TABLES."""
    key = TensorKey(item.request_id, item.node, name)
    if not (kept := context.store.get_series(key)):
        made = make()
        kept = () if made is None else (made,)
        context.store.put_series(key, kept)
    return kept[0] if kept else None


def _own_pages(
    context: WorkerContext,
    family: Family,
    item: Item,
    work: Denoise,
    number: int,
    latents: Tensor,
    sigmas: Tensor,
    table: Tensor | None,
) -> OwnPages:
    """The own pages of row `number`. latents: before the step that makes them. table: of its modulation."""
    step, (rows, columns) = work.own_page_step, family.grid(work.width, work.height)
    assert step is not None
    key, layout = TensorKey(item.request_id, item.node, OWN_PAGES[number]), family.page_layout(OWN_PAGES_DTYPE)
    if not (kept := context.store.get_series(key)):
        kept = OwnPages.room(layout, rows * columns, latents.device)
        context.store.put_series(key, kept)
    entry, made = kept
    modulation = None if table is None else table[step : step + 1]
    return OwnPages(layout, rows * columns, entry, made, step, latents, sigmas[step], modulation)


def _template(context: WorkerContext, model: str, item: Item, work: Denoise, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Clean latents of a request's template, and its noise. Both are copied to the device at the run's first step only:
    uploading waits for a GPU."""
    assert work.template is not None
    key = TensorKey(item.request_id, item.node, "template")
    if not (kept := context.store.get_series(key)):
        clean = context.clean_latents(model, work.template, num_tokens)
        noise = context.models[model].content_noise(clean, noise_id(work.content_id, work.cache_salt))
        kept = (clean.clone(), noise)  # what the page store has may move before the next step
        context.store.put_series(key, kept)
    return kept[0], kept[1]


def _page_span(context: WorkerContext, family: Family, work: Denoise, span: PageSpan) -> Pages:
    """The pages of a step. Entries still being loaded are copied in the order that the step reads their blocks."""
    rows, columns = family.grid(work.width, work.height)
    refs = [span.near] if span.far is None else [span.near, span.far]
    coming = [ref.key for ref in refs if context.pages.is_loading(ref.key)]
    for key in coming:
        context.pages.put_last(key, work.full_blocks)
    near, *far = (context.pages.entry(ref) for ref in refs)
    return Pages(
        layout=family.page_layout(span.dtype),
        num_tokens=rows * columns,
        near=near,
        far=far[0] if far else None,
        weight=span.weight,
        wait=partial(_await_pages, context, coming) if coming else None,
    )


def _await_pages(context: WorkerContext, keys: Sequence[str], block: int) -> None:
    """Wait until a block of these entries may be read."""
    for key in keys:
        context.pages.wait_block(key, block)


def _active(
    context: WorkerContext, item: Item, ref: ArrayRef, grid: tuple[int, int], device: torch.device
) -> tuple[Tensor, Box]:
    """Token indices, int64 on the device, and the box around them, found on the host. Computed at the run's first
    step only: both take time."""
    key = TensorKey(item.request_id, item.node, TABLES[0])
    if not (kept := context.store.get_series(key)):
        tokens = context.shared(ref).long()
        kept = (upload(tokens, device), torch.tensor(around(tokens, grid[1])))
        context.store.put_series(key, kept)
    active, (left, top, right, bottom) = kept[0], kept[1].tolist()
    return active, (left, top, right, bottom)


def _put_step(
    context: WorkerContext, item: Item, named: Mapping[str, Tensor], state: State, *, is_last: bool
) -> ItemResult:
    """Store what a step has made: latents and sampler state of the next version, and the clean prediction. The last
    step drops the tables that are kept for all of them.
    """
    tensors = context.put(item, named) + context.put_state(item, state)
    for name in (*TABLES, *OWN_PAGES) if is_last else ():
        context.store.free(TensorKey(item.request_id, item.node, name))
    return ItemResult(item.request_id, item.node, tensors)


@dataclass(frozen=True, slots=True)
class _Step:
    """One request's denoising step: its inputs, and how its prediction advances the sampler."""

    rows: Sequence[Row]  # one for each prompt or class
    sample: SamplingState
    scale: float  # of classifier-free guidance, for two rows
    keep_clean: bool  # whether to output the clean prediction too, for a preview
    velocity: Tensor | None  # of a request with its own pages, after its first step: the last one of every token

    @property
    def is_last(self) -> bool:
        """Whether it is the last step of its loop."""
        return self.sample.step + 2 == len(self.sample.sigmas)

    def outputs(self, family: Family, prediction: Tensor) -> tuple[dict[str, Tensor], State]:
        """(`latents` after the step and, with keep_clean, `clean`; the sampler's state). Tokens that are not active are
        unchanged, or with own pages go on with their last velocity, since a later step may compute them again.
        prediction: of the active tokens."""
        sample, active, own = self.sample, self.rows[0].active, self.rows[0].own
        if active is not None:
            others = prediction.new_zeros(sample.latents.shape) if self.velocity is None else self.velocity
            prediction = others.index_copy(0, active, prediction)
        moved, state = family.advance(sample, prediction)
        named = {"latents": moved}
        if self.keep_clean:
            named["clean"] = family.predict_clean(sample, prediction)
        if own is not None:
            return named, (*state, own.latents, prediction)
        return {name: self._of_active(latents) for name, latents in named.items()}, state

    def _of_active(self, moved: Tensor) -> Tensor:
        latents, active = self.sample.latents, self.rows[0].active
        return moved if active is None else latents.index_copy(0, active, moved[active])
