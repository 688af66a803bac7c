"""RunSpec: what a workflow of a user's classes is to make."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from core.handles import ArrayRef, Artefact
from core.messages.canvas import Canvas
from core.patches import PatchSet

_NO_CANVAS = Canvas(width=0, height=0, num_tokens=0, max_text_tokens=0)


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """Values for a workflow whose nodes have ports of their own, see `core.graph.form`. Arrays are in the sender's
    arena, and stay valid until the terminal message. The request names no model: any engine has the classes.
    """

    inputs: dict[str, ArrayRef]  # by the workflow's names; of the forms that it declares
    outputs: dict[str, ArrayRef]  # memory for results: uint8 [most bytes] each
    # Scheduling asks these of any request; they are of requests for pictures.
    previews: ClassVar[tuple[Artefact, ...]] = ()
    patches: ClassVar[PatchSet] = ()
    late: ClassVar[None] = None
    controlnets: ClassVar[tuple[str, ...]] = ()
    num_rows: ClassVar[int] = 1
    num_paged_reference_tokens: ClassVar[int] = 0
    is_mask_aware: ClassVar[bool] = False
    reads_template: ClassVar[bool] = False
    has_own_pages: ClassVar[bool] = False

    def place(self, name: str) -> ArrayRef:
        """Memory for a result."""
        return self.outputs[name]

    def gives(self, name: str) -> bool:
        """Whether it gives this input of a workflow."""
        return name in self.inputs

    def canvas(self, name: str) -> Canvas:
        """The canvas that a node works at: of no size."""
        return _NO_CANVAS

    def is_full_step(self, step: int) -> bool:
        """Whether a step computes all tokens."""
        return True

    def num_full_steps(self, first: int, end: int) -> int:
        """How many steps from `first` to before `end` compute all tokens."""
        return end - first
