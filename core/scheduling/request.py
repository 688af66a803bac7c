"""What a request is, in the two lives it has: the user's parameters and the scheduler's record.

Pure data: no torch, no processes, no clock (times are arguments, in seconds of CLOCK_MONOTONIC, which all processes of
one host share).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from core.validation import check_decimal, check_integer, check_length, conform

if TYPE_CHECKING:
    from core.cache.page_reservations import Reservation
    from core.costs.load_report import RequestLoad
    from core.graph.workflow import Progress, Workflow
    from core.handles import ArrayRef, TensorKey
    from core.messages.engine import EditRequest

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

PATIENCE_SECONDS = 60.0
"""How much younger a request that is due may be and still go first."""

CLASS_SECONDS = 2 * PATIENCE_SECONDS
"""Seconds that a class is worth, of waiting and of work: see `core.scheduling.fair_queue`."""


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


class Status(enum.Enum):
    """Where a request stands. Terminal states have exactly one message to the client each."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FAILED, Status.ABORTED}),
    Status.RUNNING: frozenset({Status.FINISHED, Status.FAILED, Status.ABORTED}),
    Status.FINISHED: frozenset(),
    Status.FAILED: frozenset(),
    Status.ABORTED: frozenset(),
}
"""Every legal move; anything else is a bug and raises."""


@dataclass(slots=True)
class Request:
    """The scheduler's record of one image being made. Only the StepScheduler writes it."""

    edit: EditRequest  # as it came; never changed
    progress: Progress  # how far it is through its workflow
    status: Status = Status.WAITING
    started: float | None = None  # when a worker began its first stage
    stage_seconds: dict[str, float] = field(default_factory=dict)  # stage -> seconds of worker time spent in it
    exported: dict[TensorKey, ArrayRef] = field(
        default_factory=dict
    )  # tensors that lie in shared memory for another rank
    exporting: TensorKey | None = None  # the transfer under way, if any
    sigmas: tuple[float, ...] = ()  # noise levels from the first step to 0; set by the image encoder's result
    hold: Reservation | None = None  # what it needs of the activation cache, once its noise levels are known
    full_blocks: int = 0  # most blocks that a mask-aware step of it computed in full, of the steps that are done
    waiting_load: RequestLoad | None = None  # what is left of it, reckoned once while it waits
    text_tokens: int = 0  # set by the text encoder's result
    prompt_truncated: bool = False  # likewise

    @property
    def id(self) -> str:
        return self.edit.request_id

    @property
    def num_all_tokens(self) -> int:
        """All its tokens, image, condition and text: what a step's tokens attend to, and what a full step computes."""
        return self.edit.num_tokens + self.edit.num_condition_tokens + self.edit.num_text_tokens

    @property
    def num_active_tokens(self) -> int:
        """Tokens that a mask-aware step computes: active image tokens plus text tokens."""
        return self.edit.active.size + self.edit.num_text_tokens

    def is_masked_step(self, step: int) -> bool:
        """Whether `step` computes only the active tokens."""
        return self.edit.is_mask_aware and step >= (self.edit.sampling.full_steps or 0)

    @property
    def num_step_tokens(self) -> int:
        """Tokens that its next denoising step computes: image tokens plus text tokens."""
        is_masked = self.is_masked_step(self.progress.steps_scheduled)
        return self.num_active_tokens if is_masked else self.num_all_tokens

    @property
    def is_in_flight(self) -> bool:
        """Whether a worker may still read or write its arrays."""
        is_lent = self.hold is not None and self.hold.is_read
        return self.progress.num_in_flight > 0 or self.exporting is not None or is_lent

    @property
    def is_live(self) -> bool:
        """Whether it still wants work done."""
        return bool(TRANSITIONS[self.status])

    @property
    def is_spoilt(self) -> bool:
        """Whether it computed blocks in full instead of waiting for their pages, and some of its pages then had to be
        primed. It begins again: an edit that primes has the picture that its pages give, however soon a missing or
        damaged file is noticed.
        """
        return self.is_live and self.full_blocks > 0 and self.hold is not None and self.hold.is_primed

    def note_step(self) -> None:
        """A step of it is done."""
        if self.hold is not None:
            self.full_blocks = max(self.full_blocks, len(self.hold.full_blocks))

    def begin_again_if_spoilt(self, workflow: Workflow) -> None:
        """Begin again at the first step, now or, with something in flight, at a later call; until then nothing more is
        scheduled. What the text encoders gave stays.
        """
        if not self.is_spoilt:
            return
        self.progress.is_restarting = True
        if self.progress.num_in_flight or self.exporting is not None:
            return
        assert self.hold is not None
        self.hold.full_blocks, self.full_blocks = (), 0
        self.exported.clear()
        self.progress.restart(node.name for node in workflow.nodes if node.stage == "text_encode")

    def move_to(self, status: Status) -> None:
        """Change status; an illegal move raises ValueError."""
        if status not in TRANSITIONS[self.status]:
            raise ValueError(f"request {self.id}: illegal move {self.status.value} -> {status.value}")
        self.status = status
