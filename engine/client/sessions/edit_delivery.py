"""EditDelivery: turns the pixels that the engines made for one edit into encoded files with their reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import numpy as np

from core.handles import NOWHERE, ArrayRef
from core.messages.engine import Finished, PartialImage
from core.messages.image_processor import ComposedImage, ComposeImage, PrepareImages
from engine.client.edit_types import EditReport, FoundMask, ImageOutput
from engine.client.run_values import RunValue
from engine.client.services import Services
from engine.client.sessions.class_values import ClassValues
from engine.client.sessions.edit_images import EditImage
from engine.client.sessions.image_work import ImageSeconds, compose_work, num_files
from engine.client.sessions.prepared_edit import PreparedEdit
from engine.client.sessions.session_memory import SessionMemory
from engine.client.templates.result_templates import ResultTemplates
from engine.images import image_ops
from engine.images.image_jobs import Caller, Room
from engine.observability.tracing import Span


class EditDelivery:
    """EditSession calls `partial` or `finished` once for each output, one at a time."""

    def __init__(
        self,
        services: Services,
        results: ResultTemplates,
        caller: Caller,
        uploads: PrepareImages,
        prepared: PreparedEdit,
        memory: SessionMemory,
        span: Span,
    ) -> None:
        """uploads: the job that prepared them. memory: holds the uploads, and the files that are made."""
        self._services = services
        self._results = results
        self._caller = caller
        self._uploads = uploads
        self._prepared = prepared
        self._memory = memory
        self._values = ClassValues(prepared.graph, memory)
        self._span = span
        self._upload_size = prepared.prepared.upload_width, prepared.prepared.upload_height
        self._num_files_left = num_files(prepared.edit)
        self.patches = prepared.choice.patches  # that its pictures are made with; late ones are set by EditSession

    @property
    def image_seconds(self) -> ImageSeconds:
        """Predicted time of the files that are not made yet."""
        compose = self._services.images.costs.predict(compose_work(self._prepared.edit, self._upload_size))
        return ImageSeconds(0.0, compose, self._num_files_left * compose)

    async def partial(self, image: EditImage, output: PartialImage) -> ImageOutput:
        """Make the file of a preview. Raises OverloadedError, EngineError."""
        composed = await self._compose(image, image.request.spec.previews[output.index].array)
        image.num_partials += 1
        return self._make_output(image, composed, partial_index=image.num_partials - 1)

    async def finished(self, image: EditImage, output: Finished) -> ImageOutput:
        """Make the file of a final image, with its report, and count it in the metrics. Raises as `partial`."""
        start = time.monotonic()
        composed = await self._compose(image, None if self._makes_mask else image.request.picture.pixels)
        self._num_files_left -= self._prepared.num_partial_images - image.num_partials  # that will not come
        seconds = time.monotonic() - start
        ready_at = image.request.arrival
        self._span.child("queue", ready_at, ready_at + output.ms["queue"] / 1e3, {"stencil.image": image.index})
        known = self._prepared
        if output.active_tokens is not None:
            known = known.with_mask(output.active_tokens)
            self._services.mask_ratios.note(known.mask_ratio)
        template_id = None if self._makes_mask else await self._keep(composed, known)
        values = await asyncio.to_thread(self._values_of, image, output) if output.shapes else {}
        report = self._make_report(known, image, output, composed, seconds, template_id, values)
        if self._makes_mask:
            self._services.metrics.observe_mask(known.model.name, report.ms)
        else:
            self._services.metrics.observe_finished(
                known.model.name,
                seconds=time.monotonic() - self._caller.arrival,
                ms=report.ms,
                mask_ratio=report.mask_ratio,
                cache=report.cache,
                num_inference_steps=report.num_inference_steps,
            )
        image.is_counted = True
        return self._make_output(image, composed, report=report)

    @property
    def _makes_mask(self) -> bool:
        """Whether the mask itself is the result."""
        return self._prepared.edit.makes_mask

    def _make_report(
        self,
        known: PreparedEdit,
        image: EditImage,
        output: Finished,
        composed: ComposedImage,
        seconds: float,
        template_id: str | None,
        values: Mapping[str, RunValue],
    ) -> EditReport:
        """known: the edit with its mask. seconds: time to make the file. template_id: of the template that the image
        became, or None. values: what users' classes made beside it."""
        prepared, ms = known.prepared, output.ms
        return EditReport(
            mask_ratio=known.mask_ratio,
            active_tokens=known.num_tokens if known.exact_reason else known.num_active_tokens,
            image_tokens=known.num_tokens,
            reference_tokens=known.num_reference_tokens,
            text_tokens=output.text_tokens,
            prompt_truncated=output.prompt_truncated,
            unmasked=prepared.unmasked,
            num_inference_steps=known.num_denoising_steps,
            steps_computed=known.num_steps_computed - (image.recalled.steps_skipped if image.recalled else 0),
            guidance_scale=known.sampling.guidance_scale if known.model.has_guidance else None,
            true_cfg_scale=known.sampling.true_cfg_scale if known.model.has_true_cfg else None,
            shift=known.sampling.shift,
            sigmas=known.sampling.sigmas,
            exact_reason=known.exact_reason,
            cache=output.cache,
            tier=output.tier,
            primed=output.is_primed,
            full_steps=known.num_full_steps,
            full_blocks=output.full_blocks,
            partial_images=image.num_partials,
            engine=image.engine,
            degrees=output.degrees,
            steps_without_lora=output.steps_without_lora,
            template_id=template_id,
            values=values,
            found=self._found(image, output, composed),
            crop=prepared.crop,
            colour_lost=composed.colour_lost,
            recalled=image.recalled,
            ms={
                "queue": ms["queue"],
                "preprocess": (image.request.arrival - self._caller.arrival) * 1e3,
                **{part: ms.get(part, 0.0) for part in ("encode", "prime", "denoise", "decode")},
                **({} if output.active_tokens is None else {"segment": ms.get("segment", 0.0)}),
                **({"run": ms["run"]} if "run" in ms else {}),
                "postprocess": seconds * 1e3,
            },
        )

    def _values_of(self, image: EditImage, output: Finished) -> dict[str, RunValue]:
        """What users' classes made beside the picture."""
        outputs = image.request.picture.outputs
        views = {name: self._services.arena.view(outputs[name].array) for name in output.shapes}
        return self._values.read(views, output.shapes)

    def _found(self, image: EditImage, output: Finished, composed: ComposedImage) -> FoundMask | None:
        """The mask that was found, if one was asked for."""
        memory = image.request.picture.active
        if output.active_tokens is None or memory is None:
            return None
        active = self._services.arena.view(msgspec.structs.replace(memory, shape=(output.active_tokens,)))
        starts = np.flatnonzero(np.diff(active, prepend=-2) != 1)
        lengths = np.diff(starts, append=len(active))
        tokens = tuple(zip(active[starts].tolist(), lengths.tolist(), strict=True))
        return FoundMask(score=round(output.mask_score, 4), box=composed.box, tokens=tokens)

    async def _keep(self, composed: ComposedImage, prepared: PreparedEdit) -> str | None:
        """Make a template of a result if its request, not a server limit, had all tokens computed; its id, or None."""
        if prepared.exact_reason not in ("asked", "mask_covers_all", prepared.graph.name):
            return None
        choice = replace(prepared.choice, patches=self.patches)
        return await self._results.keep(composed, choice, prepared.edit.owner, is_base64=prepared.edit.base64)

    async def _compose(self, image: EditImage, pixels: ArrayRef | None) -> ComposedImage:
        """pixels: uint8 [height, width, 3] at generation size; None: make the file of the mask."""
        start, edit = time.monotonic(), self._prepared.edit
        width, height = self._prepared.output_size
        nbytes = image_ops.encoded_bytes(width, height, 4, edit.base64, edit.output_format)
        out = NOWHERE

        def take() -> ArrayRef:
            nonlocal out
            out = self._memory.alloc(nbytes)
            return out

        work = compose_work(edit, self._upload_size)
        job = self._make_job(image, pixels)
        composed = await self._services.images.compose(job, work, self._caller, Room(nbytes, take))
        # The worst-case size is many times that of most pictures, and all outputs are kept until the edit ends.
        self._memory.trim(out, composed.encoded.size)
        self._num_files_left -= 1
        self._span.child("compose", start, time.monotonic(), {"stencil.image": image.index})
        return composed

    def _make_job(self, image: EditImage, pixels: ArrayRef | None) -> ComposeImage:
        edit, uploads = self._prepared.edit, self._uploads
        return ComposeImage(
            job_id=0,
            pixels=pixels,
            image=uploads.image,
            mask=uploads.mask,
            mask_kind=uploads.mask_kind,
            canvas_size=uploads.canvas_size,
            output_size=edit.output_size,
            output_format=edit.output_format,
            compression=edit.compression,
            base64=edit.base64,
            max_pixels=uploads.max_pixels,
            out=NOWHERE,
            crop=self._prepared.prepared.crop,
            mask_grow=uploads.mask_grow,
            mask_feather=uploads.mask_feather,
            found=image.request.picture.mask if uploads.is_mask_sought else None,
        )

    def _make_output(
        self,
        image: EditImage,
        composed: ComposedImage,
        partial_index: int | None = None,
        report: EditReport | None = None,
    ) -> ImageOutput:
        return ImageOutput(
            image_index=image.index,
            partial_index=partial_index,
            data=self._services.arena.view(composed.encoded).data.toreadonly(),
            width=composed.width,
            height=composed.height,
            seed=image.seed,
            report=report,
        )
