"""PictureSpec: what all kinds of requests for a picture have."""

from __future__ import annotations

import msgspec

from core.control import Control
from core.control_type import ControlType
from core.handles import ArrayRef, Artefact
from core.late_adapters import LateAdapters
from core.messages.canvas import Canvas
from core.patches import PatchSet
from core.sampling_params import SamplingParams


class PictureSpec(Canvas, frozen=True, kw_only=True):
    """A picture to make, of a prompt or of a class. It is the canvas of the final picture itself."""

    # The user's wishes.
    prompt: str
    index: int = 0  # among the pictures whose noise its seed draws in turn
    number: int = 1  # of these
    sampling: SamplingParams  # resolved, without a None that the model needs
    class_label: int | None = None  # instead of a prompt: the class to make a picture of, see `ModelInfo.num_classes`
    patches: PatchSet = ()  # adapters that change the model's layers
    late: LateAdapters | None = None  # they do from a step on
    controls: tuple[Control, ...] = ()  # for each of its control pictures, with a scale
    control_types: tuple[ControlType, ...] = ()  # what each of them names
    # From the pictures.
    content_id: str  # of the template and the references, see PreparedImages
    references: tuple[ArrayRef, ...] = ()  # further pictures to look at, uint8 [height, width, 3] each
    canvases: dict[str, Canvas] = msgspec.field(default_factory=dict)  # by name: further sizes of its workflow
    # For nodes of users' classes, of the forms that the workflow declares; by its names.
    inputs: dict[str, ArrayRef] = msgspec.field(default_factory=dict)
    # Approximate caching: latents after some steps, float32 [image tokens, latent width].
    state: ArrayRef | None = None  # of an earlier request: where steps begin; `sampling` says how many follow
    kept_states: dict[int, ArrayRef] = msgspec.field(default_factory=dict)  # steps done -> memory for its own
    # Memory for results.
    outputs: dict[str, Artefact]  # by the name that the workflow gives them
    previews: tuple[Artefact, ...] = ()  # one per partial image
    # Mask-aware execution, decided from the request and the server's flags alone.
    is_mask_aware: bool = False  # steps compute only the active tokens, over pages, except full ones
    cache_salt: str = ""  # see `CacheConfig.salt`

    def gives(self, name: str) -> bool:
        """Whether it gives this input of a workflow: a field of its own, or a sampling parameter."""
        if name == "prompt":
            return self.class_label is None
        return getattr(self if name in self.__struct_fields__ else self.sampling, name, None) not in (None, ())

    @property
    def controlnets(self) -> tuple[str, ...]:
        """Names of its ControlNets, in alphabetical order."""
        return tuple(sorted({each.net for each in self.control_types}))

    @property
    def pixels(self) -> ArrayRef:
        """Memory for the picture: uint8 [height, width, 3]."""
        return self.place("picture")

    def place(self, name: str) -> ArrayRef:
        """Memory for a result."""
        return self.outputs[name].array

    @property
    def reference_sizes(self) -> tuple[tuple[int, int], ...]:
        """(width, height) of each reference, in pixels."""
        return tuple((reference.shape[1], reference.shape[0]) for reference in self.references)

    @property
    def num_rows(self) -> int:
        """Rows of a step, see SamplingParams."""
        return self.sampling.num_rows

    @property
    def has_own_pages(self) -> bool:
        """Whether it is mask-aware over its own pages and not over its template's."""
        return self.is_mask_aware and bool(self.sampling.own_page_steps)

    @property
    def reads_template(self) -> bool:
        """Whether it is mask-aware over its template's pages."""
        return self.is_mask_aware and not self.sampling.own_page_steps

    @property
    def num_paged_reference_tokens(self) -> int:
        """Condition tokens of its references, if no step computes them: all read their keys and values from pages."""
        return self.num_reference_tokens if self.reads_template and not self.sampling.full_steps else 0

    def is_steered(self, step: int, num_steps: int) -> bool:
        """Whether any control picture steers a step, of so many. A refiner's steps are never steered."""
        return any(control.scale and control.steers(step, num_steps) for control in self.controls)

    def is_full_step(self, step: int) -> bool:
        """Whether a step of a mask-aware run computes all tokens."""
        sampling = self.sampling
        return step in sampling.own_page_steps if sampling.own_page_steps else step < (sampling.full_steps or 0)

    def num_full_steps(self, first: int, end: int) -> int:
        """How many of a mask-aware run's steps from `first` to before `end` compute all tokens."""
        if self.sampling.own_page_steps:
            return sum(first <= step < end for step in self.sampling.own_page_steps)
        return max(0, min(end, self.sampling.full_steps or 0) - first)

    def own_page_step(self, step: int) -> int | None:
        """The step whose pages a step reads, or makes if it is that step itself; None: it has no pages of its own."""
        if not self.has_own_pages:
            return None
        return max(full for full in self.sampling.own_page_steps or () if full <= step)

    def canvas(self, name: str) -> Canvas:
        """The canvas that a node of a workflow works at; "": the final picture's. Raises KeyError if the request has
        none of this name."""
        return self.canvases[name] if name else self
