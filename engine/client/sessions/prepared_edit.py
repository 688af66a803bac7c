"""PreparedEdit: an edit after its uploads were prepared; decides how it runs and makes its requests to the engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from core.config import EngineConfig
from core.graph.progress import preview_steps
from core.graph.workflow import CLASS_CONDITIONAL, HIRES, INPAINT
from core.handles import ArrayRef
from core.ipc.shared_array import carve
from core.messages.engine import Canvas, EditSpec, EngineRequest
from core.messages.image_processor import PreparedCanvas, PreparedImages
from core.model_choice import ModelChoice
from core.model_info import ModelInfo
from core.sampling_params import SamplingParams
from engine.client.edit_types import EditInput
from engine.client.resolve.mask_aware import ExactReason, resolve_full_steps, why_exact


@dataclass(frozen=True, slots=True)
class PreparedEdit:
    """sampling: of its first image, resolved: all values that the model needs are set. config: of the engines.
    class_label: the class that it asks a picture of, None for a prompt."""

    edit: EditInput
    choice: ModelChoice
    sampling: SamplingParams
    prepared: PreparedImages
    config: EngineConfig
    class_label: int | None = None

    def with_full_steps(self) -> PreparedEdit:
        """The edit with its full steps set, from the mask: `sampling_defaults.resolve` leaves them open."""
        return replace(self, sampling=resolve_full_steps(self.sampling, self.model, self.mask_ratio))

    @property
    def model(self) -> ModelInfo:
        return self.choice.model

    @property
    def output_size(self) -> tuple[int, int]:
        """(width, height) of the encoded results."""
        return self.edit.output_size or (self.prepared.upload_width, self.prepared.upload_height)

    @property
    def num_tokens(self) -> int:
        """Image tokens."""
        return self.model.num_image_tokens(self.prepared.width, self.prepared.height)

    @property
    def mask_ratio(self) -> float:
        """Tokens under the mask with its margin / image tokens, 0..1."""
        return self.prepared.active.size / self.num_tokens

    @property
    def exact_reason(self) -> ExactReason | None:
        """Why it does not run mask-aware; None if it does."""
        return why_exact(self.sampling, self.model, self.config, self.prepared.active.size, self.num_tokens)

    @property
    def num_partial_images(self) -> int:
        """Previews of each image: as many as asked for, at most one for each step before the last. With two passes
        they are of the second."""
        return len(preview_steps(self.rounds[-1], self.edit.partial_images))

    @property
    def workflow(self) -> str:
        """Name of the workflow that makes each image."""
        if self.class_label is not None:
            return CLASS_CONDITIONAL.name
        return INPAINT.name if self.prepared.first_pass is None else HIRES.name

    @property
    def rounds(self) -> tuple[int, ...]:
        """Steps of each of the workflow's loops, in order."""
        return self.model.num_steps_by_pass(self.sampling)

    @property
    def num_denoising_steps(self) -> int:
        """Denoising steps of all passes, computed or left out."""
        second = 0 if self.sampling.hires_scale is None else self.sampling.num_hires_steps
        return self.sampling.num_denoising_steps + second

    @property
    def num_steps_computed(self) -> int:
        """Those of them that are computed."""
        first = len(self.sampling.computed_of_last(self.sampling.num_denoising_steps))
        if self.sampling.hires_scale is None:
            return first
        return first + len(self.sampling.computed_of_last(self.sampling.num_hires_steps))

    @property
    def num_full_steps(self) -> int:
        """Steps that compute every token."""
        if self.exact_reason:
            return sum(self.rounds)
        return len(self.sampling.own_page_steps or ()) or self.sampling.full_steps or 0

    def make_request(
        self,
        index: int,
        request_id: str,
        alloc: Callable[[int], ArrayRef],
        *,
        arrival: float,
        trace_context: str,
    ) -> EngineRequest:
        """The request for image `index`. alloc: allocates bytes of shared memory. The rest: as in EngineRequest."""
        return EngineRequest(
            request_id=request_id,
            model=self.model.name,
            workflow=self.workflow,
            spec=self._make_spec(index, alloc),
            rounds=self.rounds,
            arrival=arrival,
            priority=self.sampling.priority,
            owner=self.edit.owner,
            trace_context=trace_context,
        )

    def _make_spec(self, index: int, alloc: Callable[[int], ArrayRef]) -> EditSpec:
        model, prepared, num_tokens = self.model, self.prepared, self.num_tokens
        width, height = prepared.width, prepared.height
        assert self.sampling.seed is not None
        sampling = msgspec.structs.replace(self.sampling, seed=self.sampling.seed + index, n=1)
        num_pictures = self.num_partial_images + 1
        pixels = alloc(num_pictures * height * width * 3)
        return EditSpec(
            prompt=self.edit.prompt,
            sampling=sampling,
            class_label=self.class_label,
            patches=self.choice.patches,
            width=width,
            height=height,
            template=prepared.template,
            mask=prepared.mask,
            active=prepared.active,
            content_id=prepared.content_id,
            num_tokens=num_tokens,
            max_text_tokens=sampling.max_sequence_length or model.max_text_tokens,
            extra_text_tokens=model.text_tokens_beside(width, height),
            num_condition_tokens=model.conditions_per_token * num_tokens,
            first_pass=None if prepared.first_pass is None else self._first_pass(prepared.first_pass),
            pixels=tuple(
                carve(pixels, i * height * width * 3, (height, width, 3), "uint8") for i in range(num_pictures)
            ),
            is_mask_aware=self.exact_reason is None,
            cache_salt=self.config.cache.salt(self.edit.owner),
        )

    def _first_pass(self, picture: PreparedCanvas) -> Canvas:
        """The canvas of the first of two passes. The prompt is encoded once for both, with the final template where the
        text encoder sees it."""
        model, final = self.model, self.prepared
        num_tokens = model.num_image_tokens(picture.width, picture.height)
        return Canvas(
            width=picture.width,
            height=picture.height,
            template=picture.template,
            mask=picture.mask,
            active=picture.active,
            num_tokens=num_tokens,
            num_condition_tokens=model.conditions_per_token * num_tokens,
            max_text_tokens=self.sampling.max_sequence_length or model.max_text_tokens,
            extra_text_tokens=model.text_tokens_beside(final.width, final.height),
        )
