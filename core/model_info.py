"""ModelInfo: sizes, defaults and abilities of a loaded model, as known to the engine, the router and the API server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from core.control_type import ControlType
from core.handles import ModelKey
from core.latent_space import LatentSpace
from core.page_scheme import PageScheme
from core.reference_pictures import ReferencePictures
from core.sampler_defaults import LEFT_OPEN, SamplerDefaults
from core.sampling_params import SamplingParams
from core.selection import SelectionKind
from core.skip_level import SkipLevel
from core.step_schedule import StepSchedule
from core.vision_tokens import VisionTokens


class BlockRun(msgspec.Struct, frozen=True):
    """Equal consecutive blocks of a model that keeps its blocks' outputs."""

    number: int  # of blocks
    pages: int  # of each block
    work: float  # of each block, as a share of the work of all blocks, 0..1


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a loaded model, sent up in the Ready messages. Set by its family when the worker loads it, unless a
    comment says otherwise.
    """

    # Identity.
    name: str  # model id that clients see
    family: str
    modality: Literal["image"] = "image"  # of what it makes
    parent: str = ""  # set by the worker for an adapter: the model that it adapts; "" for a model itself
    patch: str = ""  # set by the worker for an adapter: the id of its patch
    defaults: SamplerDefaults = LEFT_OPEN  # set by the worker for an adapter, before those of its model
    device: str  # type of device; identical devices are not distinguished
    dtype: str  # of computing
    components: tuple[ModelKey, ...] = ()  # set by the worker: what it consists of; an adapter: as its model
    # The model that finds masks for it, set by the worker. It is loaded when the first request needs it.
    segmenter: tuple[ModelKey, ...] = ()  # its components; (): there is none
    selects_by: tuple[SelectionKind, ...] = ()  # what it takes
    # Its ControlNets, set by the worker. Each is loaded when the first request needs it.
    controlnets: dict[str, ModelKey] = {}  # name -> the component
    controls: dict[str, ControlType] = {}  # control type, by which requests choose -> what it stands for
    edit_control_scale: float = 1.0  # of edits that name no scale; generations have 1. Set by the family
    latent_space: LatentSpace | None = None  # whose latents it can go on with, set by the worker
    # Other models that work for it, set by the worker.
    workflow: str = ""  # that serves its requests; "": the first one of the catalog that takes what they give
    roles: dict[str, str] = {}  # role of a workflow -> name of the model that plays it instead of this one
    borrowed: tuple[ModelKey, ...] = ()  # their components that these roles take
    # Image size.
    native_size: int  # px; the area of a square with this side caps the generation size
    token_size: int  # px of a token's side
    max_side: int | None = None  # most tokens of a picture's longer side; None: no limit
    latent_width: int  # floats per token of the packed latents
    conditions_per_token: int = 0  # condition tokens per image token of an edit; 1: the template has tokens of its own
    empty_has_conditions: bool = True  # whether pictures that are made of nothing have them, too: of an empty canvas
    references: ReferencePictures | None = None  # pictures that it sees beside the one to edit; None: it sees none
    # Classes. A model that has some makes pictures of one of them, of the native size, and edits none.
    num_classes: int = 0  # 0: it makes pictures of a prompt
    class_names: dict[str, int] = {}  # name -> class, 0 .. num_classes - 1; a class may have several, or none
    # Text.
    max_text_tokens: int  # sequence length of the text encoder; 0: there is none
    extra_text_tokens: int = 0  # further text tokens in the denoiser, for a prompt of any length
    vision: VisionTokens | None = None  # for a text encoder that sees the template: its size in tokens
    # Guidance.
    has_guidance: bool  # whether guidance_scale has an effect
    is_guidance_cfg: bool = False  # guidance_scale is of classifier-free guidance, otherwise of an embedding
    default_guidance_scale: float
    neutral_guidance_scale: float = 1.0  # where guidance_scale is classifier-free: without effect up to this
    has_true_cfg: bool  # whether true_cfg_scale has an effect
    default_true_cfg_scale: float = 1.0  # for a request with only a negative prompt
    default_refiner_start: float = 0.8  # for a model with a refiner
    # Sampler.
    default_num_inference_steps: int
    has_shift: bool = False  # whether the scheduler takes a shift
    default_shift: float | None = None  # None: the scheduler's own way
    takes_sigmas: bool = False  # whether the scheduler takes noise levels
    default_sigmas: tuple[float, ...] | None = None  # of requests with as many steps
    min_inference_steps: int = 1  # fewest steps that the sampler supports
    solver_order: int = 1
    remembers_steps: bool = False  # whether a step of the sampler depends on those before it, or draws noise
    extra_steps: int = 0  # model calls beyond those of solver_order, see num_steps
    rounds_strength_down: bool = False  # whether a step that strength covers in part is left out
    can_skip_steps: bool = False  # whether the sampler may go from any step's noise level to any later one's
    step_schedules: tuple[StepSchedule, ...] = ()  # set by the worker: those of the checkpoint's calibration
    skip_levels: tuple[SkipLevel, ...] = ()  # likewise
    # Caching.
    page_scheme: PageScheme | None = None  # set by the worker: how templates are cached; None: never mask-aware
    block_runs: tuple[BlockRun, ...] = ()  # of families that cache the outputs of blocks: the cost of each block

    @property
    def can_edit(self) -> bool:
        """Whether it edits pictures, besides making new ones."""
        return not self.num_classes

    @property
    def own(self) -> tuple[ModelKey, ...]:
        """Its components, and those of its segmenter and ControlNets."""
        return (*self.components, *self.segmenter, *self.controlnets.values())

    @property
    def needs(self) -> tuple[ModelKey, ...]:
        """All components that its requests are computed with, but for those whose mask is to be found."""
        return (*self.components, *self.borrowed)

    def with_players(self, roles: dict[str, str], borrowed: tuple[ModelKey, ...]) -> ModelInfo:
        """It with these roles and components of others, see there. A run that two models share takes all steps and
        computes all tokens, at noise levels that their schedulers make."""
        info = msgspec.structs.replace(self, roles=roles, borrowed=borrowed)
        if "refiner" not in roles:
            return info
        shared = {"takes_sigmas": False, "can_skip_steps": False, "step_schedules": (), "references": None}
        return msgspec.structs.replace(info, page_scheme=None, **shared)  # the refiner may see no references

    def controlnets_of(self, keys: Iterable[ModelKey]) -> tuple[str, ...]:
        """The names of these components, if all of them are ControlNets of it; else none."""
        names = {key: name for name, key in self.controlnets.items()}
        found = [names.get(key) for key in keys]
        return tuple(name for name in found if name is not None) if None not in found else ()

    def num_condition_tokens(self, num_tokens: int, *, has_template: bool, reference_tokens: int = 0) -> int:
        """Condition tokens of a picture of this many image tokens. reference_tokens: of its references together."""
        is_replaced = reference_tokens and self.references is not None and self.references.replaces_template
        has_own = (has_template or self.empty_has_conditions) and not is_replaced
        return reference_tokens + (self.conditions_per_token * num_tokens if has_own else 0)

    def num_reference_tokens(self, sizes: Iterable[tuple[int, int]]) -> int:
        """Condition tokens of references of these sizes, (width, height) in pixels."""
        return sum(self.num_image_tokens(*size) for size in sizes)

    def keys_of(self, *kinds: str) -> tuple[ModelKey, ...]:
        """Its components of these kinds, all of which an op of these kinds needs."""
        return tuple(key for key in self.own if key.component in kinds)

    def num_steps(self, sampling: SamplingParams) -> int:
        """Computed steps of a run, with hires_scale of its first pass. sampling: resolved as to steps."""
        return self.num_steps_of(sampling, sampling.strength)

    def num_steps_of(self, sampling: SamplingParams, strength: float, begin: float = 0.0, end: float = 1.0) -> int:
        """Computed steps of a run of this strength that are at a part of all noise levels, see
        `core.graph.workflow.Region`: of a part about as many, as if levels fell evenly, since the sampler decides.
        sampling: as for `num_steps`."""
        num_steps = sampling.steps_at(strength)
        steps = self._num_calls(len(sampling.computed_of_last(num_steps)))
        assert sampling.num_inference_steps is not None
        highest = num_steps / sampling.num_inference_steps  # noise level that the run starts from

        def before(share: float) -> int:
            """Steps before this share of the noise levels; both sides of a cut have at least one."""
            done = round(steps * (highest - (1.0 - share)) / highest)
            return min(max(done, 1), steps - 1) if 0.0 < share < 1.0 else round(share) * steps

        return max(1, before(end) - before(begin))

    def _num_calls(self, num_computed_steps: int) -> int:
        """Steps are calls of the model: a solver of order o makes o for each of its noise levels except one for the
        last, and PNDM one more."""
        return self.solver_order * (num_computed_steps - 1) + 1 + self.extra_steps

    def num_image_tokens(self, width: int, height: int) -> int:
        """Image tokens of a picture of this size in pixels."""
        return (width // self.token_size) * (height // self.token_size)

    def num_text_tokens(self, max_sequence_length: int | None = None) -> int:
        """Text tokens of a row in the denoiser, without those of a picture that the encoder sees. max_sequence_length:
        limit on the prompt's, None = the encoder's length."""
        return (max_sequence_length or self.max_text_tokens) + self.extra_text_tokens

    def text_tokens_beside(self, width: int, height: int, references: Sequence[tuple[int, int]] = ()) -> int:
        """Text tokens of a row beside the prompt's, for a template and references of these sizes in pixels."""
        if self.vision is None:
            return self.extra_text_tokens
        seen = sum(self.vision.count(*size) for size in ((width, height), *references))
        return self.extra_text_tokens + seen + self.vision.frame_tokens * len(references)
