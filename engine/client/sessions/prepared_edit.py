"""PreparedEdit: an edit after its uploads were prepared; decides how it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from core.config import EngineConfig
from core.graph.progress import preview_steps
from core.graph.workflow import Workflow
from core.messages.image_processor import PreparedImages
from core.model_choice import ModelChoice
from core.model_info import ModelInfo
from core.sampling_params import SamplingParams
from engine.client.edit_types import EditInput
from engine.client.resolve.chosen_controls import NO_CONTROLS, ChosenControls
from engine.client.resolve.chosen_workflow import rounds_of
from engine.client.resolve.mask_aware import ExactReason, resolve_full_steps, why_exact


@dataclass(frozen=True)
class PreparedEdit:
    """asked: sampling of its first image, resolved but for full steps. config: of the engines. graph: the workflow that
    makes each image. class_label: the class that it asks a picture of, None for a prompt. controls: what steers it.
    found: image tokens under the mask with its margin, found or predicted, where an engine finds it; None: it is among
    the prepared arrays."""

    edit: EditInput
    choice: ModelChoice
    asked: SamplingParams
    prepared: PreparedImages
    config: EngineConfig
    graph: Workflow
    class_label: int | None = None
    controls: ChosenControls = NO_CONTROLS
    found: int | None = None

    def with_usual_mask(self, mask_ratio: float) -> PreparedEdit:
        """The edit with a mask of this ratio, if its own is to be found."""
        if self.edit.mask_request is None:
            return self
        return self.with_mask(min(self.num_tokens, max(1, round(mask_ratio * self.num_tokens))))

    def with_mask(self, num_active: int) -> PreparedEdit:
        """The edit with a mask that was found, or is predicted. num_active: image tokens under it with its margin."""
        return replace(self, found=num_active)

    @cached_property
    def sampling(self) -> SamplingParams:
        """Of its first image: all values that the model needs are set, full steps as its mask is."""
        return resolve_full_steps(self.asked, self.model, self.mask_ratio)

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
        if self.found is not None:
            return self.found
        return self.num_tokens if self.prepared.active is None else self.prepared.active.size

    @property
    def exact_reason(self) -> ExactReason | None:
        """Why it does not run mask-aware; None if it does. Pages are of all steps with an edit's adapters, or none."""
        reason = why_exact(
            self.sampling,
            self.model,
            self.config,
            self.graph,
            self.num_active_tokens,
            self.num_tokens,
            self.num_reference_tokens,
        )
        return "late_adapters" if reason is None and self.choice.steps_without else reason

    @property
    def reference_sizes(self) -> tuple[tuple[int, int], ...]:
        """(width, height) of each reference as the model sees it, in pixels."""
        return tuple((each.shape[1], each.shape[0]) for each in self.prepared.references)

    @property
    def num_reference_tokens(self) -> int:
        """Condition tokens of its references."""
        return self.model.num_reference_tokens(self.reference_sizes)

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
        return sum(sampling.steps_at(strength) for sampling, strength in self._passes)

    @property
    def num_steps_computed(self) -> int:
        """Those of them that are computed."""
        return sum(len(sampling.computed_of_last(sampling.steps_at(strength))) for sampling, strength in self._passes)

    @property
    def _passes(self) -> list[tuple[SamplingParams, float]]:
        """How each pass over the noise levels is sampled, and its strength. Regions that are parts of one pass count
        once."""
        passes = (each for each in self.graph.regions if each.begin == 0.0)
        return [(self.sampling.with_steps(each.steps), self.sampling.number(each.strength)) for each in passes]

    @property
    def num_full_steps(self) -> int:
        """Steps that compute every token."""
        if self.exact_reason:
            return sum(self.rounds)
        return len(self.sampling.own_page_steps or ()) or self.sampling.full_steps or 0

    @property
    def decisive_sizes(self) -> list[int]:
        """Numbers of active tokens, rising from 1, between which a mask's size does not change how the edit runs: it
        does where full steps begin, and where a mask covers everything."""
        scheme, tokens = self.model.page_scheme, self.num_tokens
        shares = [schedule.full_steps_from for schedule in self.model.step_schedules]
        shares += [] if scheme is None else [scheme.full_steps_from]
        around = (round(share * tokens) + beside for share in shares for beside in (-1, 0, 1))
        return sorted({1, tokens, *(size for size in around if 1 < size < tokens)})
