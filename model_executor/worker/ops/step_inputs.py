"""StepInputs: what one request's denoising step reads. What all steps of a loop use is made by the first one that needs
it, and kept: a GPU has nothing to do until the host knows what a step reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import TypeVar

from torch import Tensor

from core.failure import Failure
from core.handles import EntryRef
from core.ipc.logs import of_request
from core.messages.worker import Item, PageSpan
from core.page_scheme import OWN_PAGES_DTYPE, PageDtype, PageLayout
from core.scheduling.ops.denoise import Denoise
from model_executor.kernels.gpu_tables import upload
from model_executor.models.base import ModulationInputs, Row, SamplingState
from model_executor.models.boxes import Box, around
from model_executor.models.controlnet.residuals import added_to
from model_executor.page_cache.own_pages import OwnPages
from model_executor.page_cache.pages import Pages
from model_executor.worker.ops.context import WorkerContext, noise_id
from model_executor.worker.stores.tensor_store import MissingValueError

logger = logging.getLogger("stencil.worker")

Kept = TypeVar("Kept")

SERIES = ("sampler", "controls")
"""Inputs that are series of tensors."""


class StepInputs:
    """Reads one step's inputs from the tensor store. Raises MissingValueError for one that was never made, and
    InvalidRequestError if an adapter of the request is not in use."""

    def __init__(self, context: WorkerContext, item: Item, work: Denoise) -> None:
        """work: the step of the item."""
        self._context, self._item, self._work = context, item, work
        self._of_loop = context.store.kept(item.request_id, item.node)
        refs = {ref.input: ref for ref in item.inputs}
        self._residuals = refs.pop("residuals", None)
        self._series = {name: context.read_series(refs.pop(name)) for name in SERIES if name in refs}
        self._values = {name: context.read(ref) for name, ref in refs.items()}
        self.family = context.family(item.model, work.patches)
        state = self._series["sampler"]
        self._last: tuple[Tensor, ...] = ()  # see `velocity`, with the latents before it
        if work.own_page_step is not None and work.step:
            state, self._last = state[:-2], state[-2:]
        latents = self._values["latents"]
        if not work.step:  # another model, which may keep them in another dtype, may have made them
            latents = latents.to(self.family.latents_dtype)
        self.sample = SamplingState(
            latents=latents,
            outside=self._values["outside"],
            sigmas=self._values["sigmas"],
            step=work.step,
            state=state,
            grid=self.family.grid(work.width, work.height),
        )
        self._references = tuple(self.family.grid(*size) for size in work.reference_sizes)

    @property
    def velocity(self) -> Tensor | None:
        """The last velocity of every token, of a request with its own pages after its first step."""
        return self._last[1] if self._last else None

    def rows(self) -> list[Row]:
        """One row for each prompt or class. What they share is the same tensor in all of them."""
        work, bare, pages = self._work, self.bare_rows(), self._pages()
        steering = self._context.read_parts(self._residuals) if self._residuals and work.is_steered else None
        rows = []
        for number, row in enumerate(bare):
            table = self._modulation(number, len(bare), row.pooled_prompt_embeds)
            own = self._own_pages(number, row.latents, table)
            whole = replace(
                row,
                pages=own.pages if own is not None and row.active is not None else pages,
                own=own,
                modulation=_of_step(table, work.step),
                prompt_state=self._prompt_state(number, row.prompt_embeds),
                streamed=None if steering is None else partial(added_to, steering, number),
            )
            rows.append(whole)
        return rows

    def bare_rows(self) -> list[Row]:
        """The rows without what only the denoiser reads: pages, and what it has made for all steps of the loop."""
        active, box = self._active()
        latents, condition = self._seen(active)
        return [
            Row(
                latents=latents,
                condition=condition,
                grid=self.sample.grid,
                references=self._references,
                prompt_embeds=embeds,
                pooled_prompt_embeds=pooled,
                sigma=self._levels[self._work.step],
                guidance_scale=self._work.guidance_scale,
                active=active,
                box=box,
                full_blocks=self._work.full_blocks,
                patches=self._work.patches,
                is_negative=number > 0 and self.family.tells_negative,
            )
            for number, (embeds, pooled) in enumerate(self._prompts())
        ]

    @property
    def controls(self) -> tuple[Tensor, ...]:
        """The control pictures, as `Family.encode_control` returns them."""
        return self._series["controls"]

    def control(self, number: int, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What a ControlNet has made of a control picture for the loop's first step. number: of the picture."""
        return self._kept(f"control-{number}", make)

    # ------------------------------------------------------------------------------------------------- the picture

    @property
    def _num_tokens(self) -> int:
        rows, columns = self.sample.grid
        return rows * columns

    def _active(self) -> tuple[Tensor | None, Box | None]:
        """Indices of the active tokens, int64 on the device, and the box around them, found on the host. Both take time
        to make. (None, None) if every token is computed."""
        ref = self._work.active
        if ref is None:
            return None, None
        return self._kept("active", lambda: self._upload_active(self._context.shared(ref).long()))

    def _upload_active(self, tokens: Tensor) -> tuple[Tensor, Box]:
        return upload(tokens, self.sample.latents.device), around(tokens, self.sample.grid[1])

    def _seen(self, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """(latents, condition) as the denoiser takes them. Where it sees tokens that are not active, these are the
        template's, noised like the template's pages."""
        work, family = self._work, self.family
        latents, condition = family.denoiser_input(self.sample), self._values["condition"]
        if active is None or not (work.full_blocks or family.sees_all_latents):
            return latents, condition
        clean, others, noise = self._kept("template", self._read_template)
        primed = family.prime_inputs(clean, noise, self._levels[work.step], others)
        mixed = primed[0].index_copy(0, active, latents[active])
        if len(condition) == len(others):  # the denoiser sees references alone
            return mixed, primed[1]
        return mixed, primed[1].index_copy(0, active, condition[active])

    def _read_template(self) -> tuple[Tensor, Tensor, Tensor]:
        """Clean latents of the template and of its references, and its noise. Uploading the noise waits for a GPU."""
        work = self._work
        assert work.template is not None
        clean, others = self._context.clean_latents(self._item.model, work.template, self._num_tokens)
        noise = self.family.content_noise(clean, noise_id(work.content_id, work.cache_salt))
        return clean.clone(), others.clone(), noise  # what the page store has may move before the next step

    # ------------------------------------------------------------------------------------------------- the prompts

    def _prompts(self) -> Sequence[tuple[Tensor, Tensor]]:
        """(prompt_embeds, pooled_prompt_embeds) of each row, as the text encoder has made them, or of the class."""
        if self._work.class_label is not None:
            return self._classes(self._work.class_label)
        embeds, lengths, pooled = (
            self._values[name] for name in ("prompt_embeds", "text_lengths", "pooled_prompt_embeds")
        )

        def split() -> Sequence[tuple[Tensor, Tensor]]:
            return list(zip(embeds.split(lengths.long().tolist()), pooled, strict=True))  # lengths are in host memory

        return self._kept_of("prompts", (embeds, lengths, pooled), split)

    def _classes(self, label: int) -> Sequence[tuple[Tensor, Tensor]]:
        """As `_prompts`, of a class; with guidance a row of any class follows."""
        labels = [label] if self._work.true_cfg_scale <= 1.0 else [label, None]
        return [(each.prompt_embeds, each.pooled_prompt_embeds) for each in map(self.family.encode_class, labels)]

    def _modulation(self, number: int, num_rows: int, pooled: Tensor) -> Tensor | None:
        """The family's modulation table of a row; None if it keeps none."""

        def make() -> Tensor | None:
            work = self._work
            facts = work.guidance_scale, self.sample.sigmas[:-1], num_rows, work.patches, work.cache_salt
            return self.family.modulation(ModulationInputs(pooled, *facts))

        return self._kept(self._name("modulation", number), make)

    def _prompt_state(self, number: int, embeds: Tensor) -> Tensor | None:
        make = partial(self.family.prompt_state, embeds, self._work.patches)
        return self._kept(self._name("prompt-state", number), make)

    def _name(self, kept: str, number: int) -> str:
        """The name under which something is kept for a row. Adapters change what it is, and the first steps may have
        none.
        """
        return f"{kept}-{number}{'-patched' if self._work.patches else ''}"

    @property
    def _levels(self) -> Sequence[Tensor]:
        """The run's noise levels, float32 scalars."""
        sigmas = self.sample.sigmas
        return self._kept_of("levels", (sigmas,), sigmas.unbind)

    # --------------------------------------------------------------------------------------------------- the pages

    def _pages(self) -> Pages | None:
        """The template's pages at the step's noise level. Entries still being loaded are copied in the order that the
        step reads their blocks."""
        context, span = self._context, self._work.pages
        if span is None:
            return None
        coming = [ref.key for ref in _entries(span) if context.pages.is_loading(ref.key)]
        for key in coming:
            context.pages.put_last(key, self._work.full_blocks)
        near, *far = (context.pages.entry(ref) for ref in _entries(span))
        return Pages(
            layout=self._page_layout(span.dtype),
            num_tokens=self._num_tokens,
            near=near,
            far=far[0] if far else None,
            weight=span.weight,
            wait=partial(self._await_pages, coming) if coming else None,
        )

    def _page_layout(self, dtype: PageDtype) -> PageLayout:
        layout = self.family.page_layout(dtype)
        return layout.with_conditions(len(self._values["condition"])) if self._references else layout

    def _await_pages(self, keys: Sequence[str], block: int) -> None:
        """Wait until a block of these entries may be read."""
        for key in keys:
            self._context.pages.wait_block(key, block)

    def _own_pages(self, number: int, latents: Tensor, table: Tensor | None) -> OwnPages | None:
        """A row's own pages. latents: as the denoiser takes them in this step. table: of the row's modulation."""
        step = self._work.own_page_step
        if step is None:
            return None
        layout = self._page_layout(OWN_PAGES_DTYPE)
        before = latents if step == self._work.step else self._last[0]
        entry, made = self._kept(f"pages-{number}", lambda: OwnPages.room(layout, self._num_tokens, before.device))
        sigma, modulation = self._levels[step], _of_step(table, step)
        return OwnPages(layout, self._num_tokens, entry, made, step, before, sigma, modulation)

    # ------------------------------------------------------------------------------------------------------ keeping

    def _kept(self, name: str, make: Callable[[], Kept]) -> Kept:
        """What `make` has made for the first step of the loop that asked."""
        if name not in self._of_loop:
            self._of_loop[name] = make()
        kept: Kept = self._of_loop[name]
        return kept

    def _kept_of(self, name: str, sources: tuple[Tensor, ...], make: Callable[[], Kept]) -> Kept:
        """What `make` has last made of these tensors. It is made again when one of them is another, as in every step
        where they are copies of another rank's."""
        last: tuple[tuple[Tensor, ...], Kept] | None = self._of_loop.get(name)
        if last is None or not all(map(is_, last[0], sources)):
            last = self._of_loop[name] = sources, make()
        return last[1]


def missed(item: Item, error: MissingValueError) -> Failure:
    """The failure of an item whose inputs were never made."""
    logger.warning("%s of %s: an earlier step failed", item.node, item.request_id, extra=of_request(""))
    return Failure("engine", f"an earlier step failed: {error.args[0]}")


def _entries(span: PageSpan) -> Sequence[EntryRef]:
    return [span.near] if span.far is None else [span.near, span.far]


def _of_step(table: Tensor | None, step: int) -> Tensor | None:
    """A step's row of a modulation table, [1, width]."""
    return None if table is None else table[step : step + 1]
