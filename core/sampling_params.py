"""SamplingParams: how one edit is to be sampled, as its user asks for it; and the ranges of its fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from core.validation import check_decimal, check_integer, check_length, conform

if TYPE_CHECKING:
    pass

MAX_PROMPT_CHARACTERS = 32000  # the images API's own limit


MAX_SEED = 2**63 - 1


MAX_INFERENCE_STEPS = 200


MAX_IMAGES = 10


MAX_GUIDANCE = 100


MIN_TIMEOUT, MAX_TIMEOUT = 0.001, 86400.0  # seconds


MAX_MASK_MARGIN = 4096  # px


MAX_PADDING_MASK_CROP = 65535  # px


MIN_SIDE, MAX_SIDE = 16, 4096  # px, of a result whose size is asked for


MAX_PRIORITY = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample one edit; names and meanings follow diffusers. None means the model's default.

    num_inference_steps: denoising steps, 1..200. guidance_scale: distilled guidance in models with a guidance
    embedding, classifier-free guidance in those made for it, 0..100. true_cfg_scale: classifier-free guidance in the
    former, 0..100, given a negative_prompt. Resolved for a model, true_cfg_scale and negative_prompt are what
    classifier-free guidance is done with in either, both None without it. n: images per request, 1..10. seed:
    0..2**63-1, ``torch.Generator("cpu").manual_seed(seed)``; None draws one; image i uses seed + i. strength: 0..1;
    resolved, rounded to steps where the model does that in a way of its own. max_sequence_length: text tokens >= 1, up
    to the model's own. mask_aware, mask_margin (px, 0..4096), full_steps (0..200): mask-aware execution; see
    docs/architecture.md. priority: lower first. timeout: seconds, 0.001..86400.

    A value of the wrong type or out of range raises InvalidRequestError, also where a message is decoded. NumPy scalars
    of the right kind are taken.
    """

    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    n: int = 1
    strength: float = 1.0
    max_sequence_length: int | None = None
    mask_aware: bool = True
    mask_margin: int | None = None
    full_steps: int | None = None
    priority: int = 0
    timeout: float | None = None

    @property
    def num_denoising_steps(self) -> int:
        """Steps really run: `strength` < 1 starts from a less noisy picture and leaves the first ones out (diffusers'
        `get_timesteps`). num_inference_steps must be set."""
        steps = self.num_inference_steps
        assert steps is not None
        return steps - int(max(steps - min(steps * self.strength, steps), 0))

    @property
    def num_rows(self) -> int:
        """Rows of the request in a step: its prompt's and, guided away from one, its negative prompt's. Resolved."""
        return 1 if self.negative_prompt is None else 2

    def __post_init__(self) -> None:
        conform(self)
        self._check_sampling()
        self._check_mask_aware()
        self._check_scheduling()

    def _check_sampling(self) -> None:
        if self.num_inference_steps is not None:
            check_integer("num_inference_steps", self.num_inference_steps, 1, MAX_INFERENCE_STEPS)
        for name in ("guidance_scale", "true_cfg_scale"):
            scale = getattr(self, name)
            if scale is not None:
                check_decimal(name, scale, 0, MAX_GUIDANCE)
        if self.negative_prompt is not None:
            check_length("negative_prompt", self.negative_prompt, MAX_PROMPT_CHARACTERS)
        check_integer("n", self.n, 1, MAX_IMAGES)
        if self.seed is not None:
            check_integer("seed", self.seed, 0, MAX_SEED - (self.n - 1))
        check_decimal("strength", self.strength, 0, 1)
        if self.max_sequence_length is not None:
            check_integer("max_sequence_length", self.max_sequence_length, 1)

    def _check_mask_aware(self) -> None:
        if self.mask_margin is not None:
            check_integer("mask_margin", self.mask_margin, 0, MAX_MASK_MARGIN)
        if self.full_steps is not None:
            check_integer("full_steps", self.full_steps, 0, MAX_INFERENCE_STEPS)

    def _check_scheduling(self) -> None:
        check_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.timeout is not None:
            check_decimal("timeout", self.timeout, MIN_TIMEOUT, MAX_TIMEOUT)
