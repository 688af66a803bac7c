"""PreparedEdit: an edit after its uploads were prepared; decides how it runs and makes its requests to the engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from core.config import EngineConfig
from core.graph.progress import preview_steps
from core.graph.workflow import Workflow
from core.handles import ArrayRef, Artefact
from core.ipc.shared_array import carve
from core.messages.canvas import Canvas
from core.messages.engine import EngineRequest
from core.messages.image_processor import PreparedCanvas, PreparedImages
from core.messages.specs import EditSpec, GenerationSpec, Spec
from core.model_choice import ModelChoice
from core.model_info import ModelInfo
from core.sampling_params import SamplingParams
from engine.client.edit_types import EditInput
from engine.client.resolve.chosen_workflow import rounds_of
from engine.client.resolve.mask_aware import ExactReason, resolve_full_steps, why_exact


@dataclass(frozen=True, slots=True)
class PreparedEdit:
    """sampling: of its first image, resolved: all values that the model needs are set. config: of the engines. graph:
    the workflow that makes each image. class_label: the class that it asks a picture of, None for a prompt."""

    edit: EditInput
    choice: ModelChoice
    sampling: SamplingParams
    prepared: PreparedImages
    config: EngineConfig
    graph: Workflow
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
        return self.num_active_tokens / self.num_tokens

    @property
    def num_active_tokens(self) -> int:
        """Image tokens under the mask with its margin."""
        return self.num_tokens if self.prepared.active is None else self.prepared.active.size

    @property
    def exact_reason(self) -> ExactReason | None:
        """Why it does not run mask-aware; None if it does."""
        return why_exact(
            self.sampling,
            self.model,
            self.config,
            self.graph,
            self.num_active_tokens,
            self.num_tokens,
            self.num_reference_tokens,
        )

    @property
    def _reference_sizes(self) -> tuple[tuple[int, int], ...]:
        """(width, height) of each reference as the model sees it, in pixels."""
        return tuple((each.shape[1], each.shape[0]) for each in self.prepared.references)

    @property
    def num_reference_tokens(self) -> int:
        """Condition tokens of its references."""
        return self.model.num_reference_tokens(self._reference_sizes)

    @property
    def num_partial_images(self) -> int:
        """Previews of each image: as many as asked for, at most one for each step before the last of those that the
        workflow shows."""
        rounds = dict(zip((region.name for region in self.graph.regions), self.rounds, strict=True))
        shown = (rounds[self.graph.node(side.shows).region] for side in self.graph.side_nodes)
        return max((len(preview_steps(steps, self.edit.partial_images)) for steps in shown), default=0)

    @property
    def rounds(self) -> tuple[int, ...]:
        """Steps of each of the workflow's loops, in order."""
        return rounds_of(self.graph, self.model, self.sampling)

    @property
    def num_denoising_steps(self) -> int:
        """Denoising steps of all passes, computed or left out."""
        return sum(self.sampling.steps_at(strength) for strength in self._strengths)

    @property
    def num_steps_computed(self) -> int:
        """Those of them that are computed."""
        sampling = self.sampling
        return sum(len(sampling.computed_of_last(sampling.steps_at(strength))) for strength in self._strengths)

    @property
    def _strengths(self) -> list[float]:
        """The strength of each pass over the noise levels. Regions that are parts of one pass count once."""
        return [self.sampling.number(each.strength) for each in self.graph.regions if each.begin == 0.0]

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
            workflow=self.graph.name,
            spec=self._make_spec(index, alloc),
            rounds=self.rounds,
            arrival=arrival,
            priority=self.sampling.priority,
            owner=self.edit.owner,
            trace_context=trace_context,
        )

    def _make_spec(self, index: int, alloc: Callable[[int], ArrayRef]) -> Spec:
        prepared, shape = self.prepared, (self.prepared.height, self.prepared.width, 3)
        assert self.sampling.seed is not None
        num_previews, num_outputs = self.num_partial_images, len(self.graph.outputs)
        num_bytes, num_pictures = math.prod(shape), num_previews + num_outputs
        pixels = alloc(num_pictures * num_bytes)
        pictures = [Artefact(carve(pixels, number * num_bytes, shape, "uint8")) for number in range(num_pictures)]
        common = {
            **msgspec.structs.asdict(self._canvas(prepared)),
            "prompt": self.edit.prompt,
            "sampling": msgspec.structs.replace(self.sampling, seed=self.sampling.seed + index, n=1),
            "class_label": self.class_label,
            "patches": self.choice.patches,
            "content_id": prepared.content_id,
            "references": prepared.references,
            "canvases": {name: self._canvas(picture) for name, picture in prepared.canvases.items()},
            "outputs": dict(zip(self.graph.outputs, pictures[num_previews:], strict=True)),
            "previews": tuple(pictures[:num_previews]),
            "cache_salt": self.config.cache.salt(self.edit.owner),
        }
        if prepared.template is None:
            return GenerationSpec(**common)
        return EditSpec(**common, is_mask_aware=self.exact_reason is None)

    def _canvas(self, picture: PreparedImages | PreparedCanvas) -> Canvas:
        """The canvas of one size. The prompt is encoded once for all, with the final template where the text encoder
        sees it."""
        model, final, references = self.model, self.prepared, self._reference_sizes
        num_tokens, beside = model.num_image_tokens(picture.width, picture.height), self.num_reference_tokens
        conditions = model.num_condition_tokens(
            num_tokens, has_template=picture.template is not None, reference_tokens=beside
        )
        return Canvas(
            width=picture.width,
            height=picture.height,
            template=picture.template,
            mask=picture.mask,
            active=picture.active,
            num_tokens=num_tokens,
            num_condition_tokens=conditions,
            num_reference_tokens=beside,
            max_text_tokens=self.sampling.max_sequence_length or model.max_text_tokens,
            extra_text_tokens=model.text_tokens_beside(final.width, final.height, references),
        )
