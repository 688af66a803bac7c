"""What a request is, in the two lives it has: the user's parameters and the scheduler's record.

Pure data: no torch, no processes, no clock (times are arguments, in seconds of CLOCK_MONOTONIC, which all processes of
one host share).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.cache.reservation import Reservation
    from core.costs.load_report import RequestLoad
    from core.graph.progress import Progress
    from core.graph.workflow import Workflow
    from core.handles import ArrayRef, TensorKey
    from core.messages.engine import EditRequest


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
    reservation: Reservation | None = None  # what it needs of the activation cache, once its noise levels are known
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
        is_lent = self.reservation is not None and self.reservation.is_read
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
        return self.is_live and self.full_blocks > 0 and self.reservation is not None and self.reservation.is_primed

    def note_step(self) -> None:
        """A step of it is done."""
        if self.reservation is not None:
            self.full_blocks = max(self.full_blocks, len(self.reservation.full_blocks))

    def begin_again_if_spoilt(self, workflow: Workflow) -> None:
        """Begin again at the first step, now or, with something in flight, at a later call; until then nothing more is
        scheduled. What the text encoders gave stays.
        """
        if not self.is_spoilt:
            return
        self.progress.is_restarting = True
        if self.progress.num_in_flight or self.exporting is not None:
            return
        assert self.reservation is not None
        self.reservation.full_blocks, self.full_blocks = (), 0
        self.exported.clear()
        self.progress.restart(node.name for node in workflow.nodes if node.stage == "text_encode")

    def move_to(self, status: Status) -> None:
        """Change status; an illegal move raises ValueError."""
        if status not in TRANSITIONS[self.status]:
            raise ValueError(f"request {self.id}: illegal move {self.status.value} -> {status.value}")
        self.status = status
