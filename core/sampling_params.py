"""SamplingParams: how one edit is sampled, as requested by its user. Also the ranges of all fields of a request."""

from __future__ import annotations

from itertools import pairwise
from typing import Self

import msgspec

from core.errors import InvalidRequestError
from core.step_schedule import StepScheduleName
from core.validation import check_decimal, check_integer, check_length, conform

MAX_PROMPT_CHARACTERS = 32000  # the images API's own limit
MAX_SEED = 2**63 - 1
MAX_INFERENCE_STEPS = 200
MAX_SEQUENCE_LENGTH = 2**20  # text tokens; more than any text encoder takes
MAX_IMAGES = 10  # made by one request
MAX_GUIDANCE = 100
MIN_SHIFT, MAX_SHIFT = 0.01, 100.0
MIN_FALL = 1e-6  # between two noise levels; float32 tells these apart
MIN_TIMEOUT, MAX_TIMEOUT = 0.001, 86400.0  # seconds
MAX_MASK_MARGIN = 4096  # px
MAX_PADDING_MASK_CROP = 65535  # px
MIN_SIDE, MAX_SIDE = 16, 4096  # px, of a requested result size
MIN_REFINER_START, MAX_REFINER_START = 0.01, 0.99  # at the ends one of the two models would have nothing to do
MIN_HIRES_SCALE, MAX_HIRES_SCALE = 1.1, 4.0  # below it both passes would have nearly the same size
MAX_PRIORITY = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample one edit; names and meanings follow diffusers. None means the model's default.

    Set by the user, and resolved for the model (`engine.client.resolve.sampling_defaults`) before the edit is sent to
    an engine. A value of the wrong type or out of range raises InvalidRequestError, also when a message is decoded.
    NumPy scalars of the right kind are accepted.
    """

    # Sampling.
    num_inference_steps: int | None = None  # denoising steps, 1..MAX_INFERENCE_STEPS
    guidance_scale: float | None = None  # 0..MAX_GUIDANCE; of a guidance embedding, or classifier-free guidance
    # Noise levels of flow matching are shifted by this factor, MIN_SHIFT..MAX_SHIFT, instead of as the scheduler would.
    shift: float | None = None
    # Noise levels before each step and before they are shifted, from at most 1 down, each MIN_FALL or more above the
    # next one, and the last above 0. None: evenly spaced.
    sigmas: tuple[float, ...] | None = None
    # Which of these steps are computed: by name, None = the server's choice, or by number, rising from 0, which wins.
    # Resolved: by number, None = all.
    step_schedule: StepScheduleName | None = None
    computed_steps: tuple[int, ...] | None = None
    # Classifier-free guidance of models whose guidance_scale is an embedding's, 0..MAX_GUIDANCE; needs negative_prompt.
    # Resolved: the scale and the negative prompt of classifier-free guidance in any model, both None without it.
    true_cfg_scale: float | None = None
    negative_prompt: str | None = None  # at most MAX_PROMPT_CHARACTERS
    # 0..MAX_SEED, for torch.Generator("cpu"); image i uses seed + i, unless they are a batch; None: drawn at random
    seed: int | None = None
    n: int = 1  # images per request, 1..MAX_IMAGES
    strength: float = 1.0  # 0..1; resolved: rounded to steps, for models that do that in their own way
    max_sequence_length: int | None = None  # text tokens, from 1 to the model's own
    # Whether the picture may begin in a state that an earlier one of the same owner has kept, and keeps some for later
    # ones, see `core.skip_level`. None: as the model's workflow says, else not.
    approximate_caching: bool | None = None
    # Two passes: the first makes a picture smaller by this factor, MIN_HIRES_SCALE..MAX_HIRES_SCALE, whose latents are
    # then enlarged and denoised again. None: one pass.
    hires_scale: float | None = None
    hires_strength: float = 0.6  # of the second pass, as `strength` is of the first; without hires_scale no effect
    # For models with a refiner: where it takes over, as a share of the noise levels from the highest down,
    # MIN_REFINER_START..MAX_REFINER_START. None: the model's default; resolved: without a refiner.
    refiner_start: float | None = None
    # Mask-aware execution, see docs/architecture.md.
    mask_aware: bool = True
    mask_margin: int | None = None  # px, 0..MAX_MASK_MARGIN
    full_steps: int | None = None  # leading steps that compute every token, 0..MAX_INFERENCE_STEPS
    # Steps that compute every token, whose pages the steps after them read instead of the template's: numbers among the
    # computed steps, rising from 0; (): none. None: full_steps, else what the schedule was calibrated with.
    own_page_steps: tuple[int, ...] | None = None
    # The most first steps that may run without adapters that are still loading, 0..MAX_INFERENCE_STEPS.
    steps_without_lora: int = 0
    # Scheduling.
    priority: int = 0  # -MAX_PRIORITY..MAX_PRIORITY; lower goes first
    timeout: float | None = None  # seconds, MIN_TIMEOUT..MAX_TIMEOUT

    @property
    def num_denoising_steps(self) -> int:
        """Number of steps run, with hires_scale by the first pass: `strength` < 1 starts from a less noisy picture and
        leaves out the first steps. num_inference_steps must be set."""
        return self.steps_at(self.strength)

    def steps_at(self, strength: float) -> int:
        """Number of steps of a run with this strength, as in diffusers' `get_timesteps`. num_inference_steps must be
        set."""
        steps = self.num_inference_steps
        assert steps is not None
        return steps - int(max(steps - min(steps * strength, steps), 0))

    def with_steps(self, steps: int) -> Self:
        """These parameters with a schedule of this many steps, evenly spaced and all computed. 0: unchanged."""
        if not steps:
            return self
        return msgspec.structs.replace(self, num_inference_steps=steps, computed_steps=None, sigmas=None)

    def number(self, wanted: str | float) -> float:
        """The parameter of this name, which must be set, or the number itself."""
        value = getattr(self, wanted) if isinstance(wanted, str) else wanted
        assert isinstance(value, int | float), f"{wanted} is not set"
        return float(value)

    def computed_of_last(self, num_steps: int) -> tuple[int, ...]:
        """Numbers of the computed steps among the last `num_steps` of a run, counted from the first of these, which is
        always computed: its noise level is where sampling starts. Must be resolved.
        """
        if self.computed_steps is None:
            return tuple(range(num_steps))
        assert self.num_inference_steps is not None
        first = self.num_inference_steps - num_steps
        return (0, *(step - first for step in self.computed_steps if step > first))

    @property
    def num_rows(self) -> int:
        """Rows of the request in a step: one for its prompt and one for a negative prompt. Must be resolved."""
        return 1 if self.negative_prompt is None else 2

    def __post_init__(self) -> None:
        conform(self)
        self._check_sampling()
        self._check_mask_aware()
        self._check_scheduling()

    def _check_sampling(self) -> None:
        if self.num_inference_steps is not None:
            check_integer("num_inference_steps", self.num_inference_steps, 1, MAX_INFERENCE_STEPS)
        self._check_computed_steps()
        if self.shift is not None:
            check_decimal("shift", self.shift, MIN_SHIFT, MAX_SHIFT)
        if self.sigmas is not None:
            self._check_sigmas(self.sigmas)
        for name in ("guidance_scale", "true_cfg_scale"):
            scale = getattr(self, name)
            if scale is not None:
                check_decimal(name, scale, 0, MAX_GUIDANCE)
        if self.negative_prompt is not None:
            check_length("negative_prompt", self.negative_prompt, MAX_PROMPT_CHARACTERS)
        check_integer("n", self.n, 1, MAX_IMAGES)
        if self.seed is not None:
            check_integer("seed", self.seed, 0, MAX_SEED - (self.n - 1))
        for name in ("strength", "hires_strength"):
            check_decimal(name, getattr(self, name), 0, 1)
        if self.hires_scale is not None:
            check_decimal("hires_scale", self.hires_scale, MIN_HIRES_SCALE, MAX_HIRES_SCALE)
        if self.refiner_start is not None:
            check_decimal("refiner_start", self.refiner_start, MIN_REFINER_START, MAX_REFINER_START)
        if self.max_sequence_length is not None:
            check_integer("max_sequence_length", self.max_sequence_length, 1, MAX_SEQUENCE_LENGTH)

    def _check_computed_steps(self) -> None:
        steps, limit = self.computed_steps, self.num_inference_steps or MAX_INFERENCE_STEPS
        if steps is not None and (steps[:1] != (0,) or sorted({*steps}) != [*steps] or steps[-1] >= limit):
            message = f"Invalid 'computed_steps': must rise from 0 to below {limit}, the number of steps."
            raise InvalidRequestError(message, param="computed_steps")

    def _check_sigmas(self, sigmas: tuple[float, ...]) -> None:
        is_falling = all(high - low >= MIN_FALL for high, low in pairwise((*sigmas, 0.0)))
        if not sigmas or not is_falling or not sigmas[0] <= 1 or len(sigmas) > MAX_INFERENCE_STEPS:
            what = f"must be 1 to {MAX_INFERENCE_STEPS} noise levels that fall, from at most 1 to above 0"
            raise InvalidRequestError(f"Invalid 'sigmas': {what}.", param="sigmas")
        if self.num_inference_steps not in (None, len(sigmas)):
            what = f"{len(sigmas)} noise levels, and num_inference_steps is {self.num_inference_steps}"
            raise InvalidRequestError(f"Invalid 'sigmas': {what}; give one of them.", param="sigmas")

    def _check_mask_aware(self) -> None:
        if self.mask_margin is not None:
            check_integer("mask_margin", self.mask_margin, 0, MAX_MASK_MARGIN)
        if self.full_steps is not None:
            check_integer("full_steps", self.full_steps, 0, MAX_INFERENCE_STEPS)
        own = self.own_page_steps
        if own and (own[0] != 0 or sorted({*own}) != [*own] or own[-1] >= MAX_INFERENCE_STEPS):
            message = f"Invalid 'own_page_steps': must rise from 0 to below {MAX_INFERENCE_STEPS}."
            raise InvalidRequestError(message, param="own_page_steps")
        if own and self.full_steps:
            message = "Invalid 'own_page_steps': give it or 'full_steps', not both."
            raise InvalidRequestError(message, param="own_page_steps")

    def _check_scheduling(self) -> None:
        check_integer("steps_without_lora", self.steps_without_lora, 0, MAX_INFERENCE_STEPS)
        check_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.timeout is not None:
            check_decimal("timeout", self.timeout, MIN_TIMEOUT, MAX_TIMEOUT)
