"""Request: the scheduler's record of one image, and the state machine of its status.

Pure data: no torch, no processes, no clock (times are arguments, in seconds of CLOCK_MONOTONIC, which all processes of
one host share).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from core.errors import InvalidRequestError
from core.graph.progress import Progress, preview_steps
from core.graph.skipping import readers_of
from core.graph.workflow import Node, Workflow, op_of
from core.messages.specs import EditSpec, MaskSpec, RunSpec
from core.messages.specs.picture_spec import PictureSpec

if TYPE_CHECKING:
    from core.costs.load_report import RequestLoad
    from core.graph.work import Work
    from core.handles import ArrayRef, RankIds, TensorKey, TensorRef
    from core.messages.canvas import Canvas
    from core.messages.engine import EngineRequest
    from core.messages.specs import Spec
    from core.patches import PatchSet
    from core.scheduling.requests.bindings import Binding, Bindings, ModelKeys, Needs
    from core.scheduling.requests.work_left import WorkLeft


class Status(enum.Enum):
    """State of a request. Each terminal state (finished, failed, aborted) sends the client exactly one message."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FAILED, Status.ABORTED}),
    # To WAITING: it is to run alone after a rank's death.
    Status.RUNNING: frozenset({Status.WAITING, Status.FINISHED, Status.FAILED, Status.ABORTED}),
    Status.FINISHED: frozenset(),
    Status.FAILED: frozenset(),
    Status.ABORTED: frozenset(),
}
"""Every legal transition; any other raises."""

SUSPECT_DEATHS = 2
"""Number of processes that have died while they ran a request, from which on it runs alone and cannot fail others."""


@dataclass(frozen=True, slots=True)
class NodeSizes:
    """The sizes of one node's work for a request, see `core.graph.op.Sizes`."""

    canvas: Canvas
    num_rows: int
    num_step_tokens: int
    num_paged_reference_tokens: int
    num_elements: int = 0

    @property
    def num_tokens(self) -> int:
        return self.canvas.num_tokens

    @property
    def num_reference_tokens(self) -> int:
        return self.canvas.num_reference_tokens

    @property
    def num_controls(self) -> int:
        return len(self.canvas.control_pictures)

    @property
    def num_text_tokens(self) -> int:
        return self.canvas.num_text_tokens

    @property
    def num_all_tokens(self) -> int:
        return self.canvas.num_all_tokens


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a region after some rounds. Once it is in shared memory, no rank's death can take it."""

    region: str
    round: int  # number of rounds done
    keys: tuple[TensorKey, ...]  # keys of its values, which are pinned


@dataclass(slots=True)
class Request:
    """The scheduler's record of one image being made. Written only by the StepScheduler and its parts."""

    # Set when it is added.
    head: EngineRequest  # as received; never changed
    workflow: Workflow
    binding: Binding  # which models run its nodes
    progress: Progress  # position in its workflow; written by the scheduler and its Dispatcher
    # Copied from the head, for quick access.
    id: str = field(init=False)
    spec: Spec = field(init=False)  # once a mask is found, the one that goes with it
    # Set by the scheduler and its Dispatcher.
    status: Status = Status.WAITING
    # (node, version of the values that it makes) -> the ranks of a run in flight
    sent_to: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)  # all ranks that it was ever sent to
    step_ranks: RankIds = ()  # those that its last step was sent to, if all of them live
    # (node, ranks) -> the inputs that all rounds of the node share
    fixed_inputs: dict[tuple[str, tuple[int, ...]], tuple[TensorRef, ...]] = field(default_factory=dict)
    # (canvas, whether a step is mask-aware) -> sizes
    known_sizes: dict[tuple[str, bool], NodeSizes] = field(default_factory=dict)
    # (node, whether it is a mask-aware step) -> its work
    known_work: dict[tuple[str, bool], Work] = field(default_factory=dict)
    # Its late adapters, if it has some.
    patches: PatchSet = field(init=False)  # all of its adapters; () while late ones are not loaded
    lacks_adapters: bool = False  # late ones are not loaded; asked for several times in every pass
    num_begun: int = 0  # of its first steps, those that were sent without; at least 1 once anything was sent
    steps_without_lora: int | None = None  # of its first steps, those that run without, once they are loaded
    has_lost_rank: bool = False  # one of its ranks has died: values may be in shared memory alone
    num_moving: int = 0  # values that a worker is writing to shared memory
    num_deaths: int = field(init=False)  # processes that died while they ran it
    num_broken: int = 0  # its batches that failed on several ranks
    steps_alone: int = 0  # that it has to make on one rank before it may have several again
    # It has lost something with a rank, or its group broke: results in flight do not count, and then it resumes.
    is_set_back: bool = False
    made_outputs: set[tuple[str, str]] = field(default_factory=set)  # (node, output) that was made at least once
    lost: list[TensorKey] = field(default_factory=list)  # values that are nowhere any more, since it was set back
    # Set by the scheduler's Checkpoints.
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)  # region -> the last complete one
    unwritten: list[Checkpoint] = field(default_factory=list)  # later ones that are not complete yet
    saved_rounds: dict[str, int] = field(default_factory=dict)  # region -> rounds done at its last one, complete or not
    rounds_between: dict[str, int] = field(default_factory=dict)  # region -> rounds from one checkpoint to the next
    # Set by the scheduler from results of batches.
    started: float | None = None  # when a worker began its first run, monotonic seconds
    made: float | None = None  # when a worker ended its last run so far, monotonic seconds
    part_seconds: dict[str, float] = field(default_factory=dict)  # Part -> worker seconds spent in it
    degrees: dict[tuple[str, int], int] = field(default_factory=dict)  # (step node, round) -> ranks that computed it
    # Set by the Predictor.
    waiting_load: RequestLoad | None = None  # remaining work as it is reported, made once while it waits
    kept_work: tuple[int, WorkLeft] | None = None  # (generation of predictions, remaining work)
    # From nodes with ports of their own.
    made_sizes: dict[tuple[str, str], int] = field(default_factory=dict)  # (node, output) -> elements that it has made
    result_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by name
    # From the segmenter.
    active_tokens: int | None = None  # of the mask that it has found; None: none was asked for, or it is not found yet
    mask_score: float = 0.0  # how sure it is, 0..1
    # From the text encoder.
    text_tokens: int = 0
    prompt_truncated: bool = False

    @classmethod
    def of(cls, head: EngineRequest, workflows: Mapping[str, Workflow], bindings: Bindings) -> Request:
        """The record of a request that has not begun. workflows: by name. bindings: of the served models. Raises
        InvalidRequestError if the request's workflow is not among them, or if the request lacks something that its
        workflow needs.
        """
        workflow = workflows.get(head.workflow)
        if workflow is None:
            raise InvalidRequestError(f"there is no workflow {head.workflow!r}", param="workflow")
        if len(head.rounds) != len(workflow.regions) or min(head.rounds, default=1) < 1:
            message = f"workflow {workflow.title} takes {len(workflow.regions)} numbers of rounds, each at least 1"
            raise InvalidRequestError(message, param="rounds")
        _check_given(head.spec, workflow)
        rounds = dict(zip((region.name for region in workflow.regions), head.rounds, strict=True))
        shown = {
            side.name: preview_steps(rounds[workflow.node(side.shows).region], len(head.spec.previews))
            for side in workflow.side_nodes
        }
        binding = bindings.of(head.model, workflow, head.spec.controlnets, reads_template=head.spec.reads_template)
        return cls(head, workflow, binding, Progress(workflow, rounds, shown))

    def __post_init__(self) -> None:
        self.id, self.spec, self.num_deaths = self.head.request_id, self.head.spec, self.head.num_deaths
        self.patches, late = self.spec.patches, self.spec.late
        self.lacks_adapters = late is not None and not late.are_loaded
        if late is not None and late.are_loaded:
            self.steps_without_lora = late.least

    @property
    def picture(self) -> PictureSpec:
        """What it asks for, of a request for a picture or a mask."""
        assert isinstance(self.spec, PictureSpec), f"{self.id} asks for no picture"
        return self.spec

    @property
    def runs_on_one_rank(self) -> bool:
        """Whether several ranks are not to share its steps now."""
        return self.steps_alone > 0

    @property
    def step_node(self) -> Node | None:
        """The node that makes its next step; once all are sent, the one that has made the last. None: it has no
        steps."""
        steps = self.workflow.counted_steps
        if len(steps) == 1:  # asked for several times in every pass
            return steps[0]
        return next((node for node in steps if self.progress.times_left(node)), steps[-1] if steps else None)

    @property
    def denoiser(self) -> ModelKeys | None:
        """The components that its next step is computed with; once all are sent, the last one's. None: it has no
        steps.
        """
        node = self.step_node
        return None if node is None else self.keys_of(node)

    def model_of(self, node: Node) -> str:
        """Name of the model whose family runs a node."""
        return self.binding.models[node.name]

    def keys_of(self, node: Node) -> ModelKeys:
        """The components that a node computes with."""
        return self.binding.keys[node.name]

    @property
    def needs(self) -> Needs:
        """The components that its nodes compute with, and its template's pages are made with."""
        return self.binding.needs

    def patches_of(self, node: Node) -> PatchSet:
        """The adapters that change the layers of a node's model in its next run: only the request's own model has any,
        and late ones from one of its steps on.
        """
        if self.model_of(node) != self.head.model:
            return ()
        without = self.steps_without_lora
        if self.spec.late is None or without == 0:
            return self.patches
        has_them = without is not None and node.region and self._step_of(node) >= without
        return self.patches if has_them else ()

    def awaits_adapters(self, node: Node) -> bool:
        """Whether the next run of a ready node is to have late adapters that are not loaded: from the step that waits
        for them on, and in the last step of the request's own model at the latest.
        """
        late = self.spec.late
        if late is None or not self.lacks_adapters or self.model_of(node) != self.head.model:
            return False
        own = [step.region for step in self.workflow.counted_steps if self.model_of(step) == self.head.model]
        if not own:
            return False
        last = self._first_steps[own[-1]] + self.progress.rounds[own[-1]] - 1
        return self._step_of(node) >= min(late.most, last)

    @property
    def stands_still(self) -> bool:
        """Whether its next step waits for late adapters, so that it needs no slot."""
        return self.lacks_adapters and self.step_node is not None and self.awaits_adapters(self.step_node)

    def use_adapters(self, patches: PatchSet) -> None:
        """Have late adapters, which are loaded now, from the next step on, or from where the request had them when it
        was computed before. patches: all of its adapters.
        """
        assert self.spec.late is not None, f"{self.id} has no late adapters"
        if self.lacks_adapters:
            self.patches, self.steps_without_lora = patches, max(self.spec.late.least, self.num_begun)
            self.lacks_adapters = False

    def _step_of(self, node: Node) -> int:
        """The number of the step that the next run of a node is for, over all loops of steps; 0 outside of these."""
        first = self._first_steps.get(node.region)
        return 0 if first is None else first + self.progress.scheduled[node.name]

    def first_step(self, loop: str) -> int:
        """The number of a loop's first step, over all loops of steps; 0 if it is none of these."""
        return self._first_steps.get(loop, 0)

    @property
    def _first_steps(self) -> dict[str, int]:
        """Loop of steps -> the number of its first one."""
        loops = list(dict.fromkeys(step.region for step in self.workflow.counted_steps))
        ends = accumulate((self.progress.rounds[loop] for loop in loops), initial=0)
        return dict(zip(loops, ends, strict=False))

    def preview_place(self, node: Node) -> ArrayRef | None:
        """Memory that the caller sees, for the picture of a side node's run; None: other nodes alone get it."""
        if not self.workflow.is_preview(node):
            return None
        return self.picture.previews[self.progress.pending[node.name]].array

    def sizes(self, node: Node) -> NodeSizes:
        """The sizes of a node's next run."""
        return self.sizes_of(node, is_masked=self.is_masked(node))

    def sizes_of(self, node: Node, *, is_masked: bool) -> NodeSizes:
        """The sizes of a node's run that is a mask-aware step, or that computes all tokens."""
        sizes = self.known_sizes.get((node.canvas, is_masked))
        if sizes is None:
            canvas = self.spec.canvas(node.canvas)
            tokens = canvas.num_active_tokens if is_masked else canvas.num_all_tokens
            paged = self.spec.num_paged_reference_tokens
            sizes = self.known_sizes[node.canvas, is_masked] = NodeSizes(canvas, self.spec.num_rows, tokens, paged)
        return sizes

    def work(self, node: Node) -> Work:
        """Tokens that a node's next run computes, and those they attend to."""
        return self.work_of(node, is_masked=self.is_masked(node))

    def work_of(self, node: Node, *, is_masked: bool) -> Work:
        """`work` of a run that is a mask-aware step, or that computes all tokens."""
        key = node.name, is_masked
        work = self.known_work.get(key)
        if work is None:
            op, sizes = op_of(node), self.sizes_of(node, is_masked=is_masked)
            if op.has_own_ports:
                sizes = replace(sizes, num_elements=self._num_elements(node))
            work = self.known_work[key] = op.size(sizes)
        return work

    def _num_elements(self, node: Node) -> int:
        """Elements of a node's inputs: as they were made or given, else the most that is declared."""
        sizes = {port.name: port.form.size for port in node.takes if port.form is not None}
        given = {name: self.spec.inputs.get(source) for name, source in node.given.items()}
        known = {name: array.size for name, array in given.items() if array is not None}
        for edge in node.inputs:
            is_decoded = not op_of(self.workflow.node(edge.source)).has_own_ports
            most = self.picture.pixels.size if is_decoded else sizes[edge.input]
            known[edge.input] = self.made_sizes.get((edge.source, edge.name), most)
        return sum(known.values()) + len(node.literals)

    def note_sizes(self, node: Node, sizes: Mapping[str, int]) -> None:
        """Note how many elements the outputs of a node have, on which the work of its readers depends."""
        self.made_sizes |= {(node.name, name): size for name, size in sizes.items()}
        for name in readers_of(self.workflow, node.name):
            self.known_work.pop((name, False), None)

    def is_masked(self, node: Node) -> bool:
        """Whether the next run of a node is a mask-aware step."""
        if not node.region or node.canvas or not self.spec.is_mask_aware:
            return False
        return not self.spec.is_full_step(self.progress.scheduled[node.name])

    def steps_left(self, node: Node) -> list[tuple[int, Work]]:
        """(number, work of one) of a node's remaining steps: first those that compute all tokens, then the others."""
        times = self.progress.times_left(node)
        if not times:
            return []
        if node.canvas or not self.spec.is_mask_aware:
            return [(times, self.work(node))]
        first = self.progress.scheduled[node.name]
        num_full = self.spec.num_full_steps(first, first + times)
        kinds = (num_full, False), (times - num_full, True)
        return [(number, self.work_of(node, is_masked=is_masked)) for number, is_masked in kinds if number]

    def reads_template_pages(self, node: Node) -> bool:
        """Whether the next run of a node reads its template's pages."""
        return self.is_masked(node) and self.spec.reads_template

    def send(self, node: Node, ranks: tuple[int, ...]) -> None:
        """Note that a node's next run is sent to these ranks."""
        if self.lacks_adapters:
            self.num_begun = max(self.num_begun, self._step_of(node) + 1)
        self.progress.start(node)
        self.sent_to[node.name, self.progress.scheduled[node.name] if node.region else 0] = ranks
        self.ranks.update(ranks)
        if node.name in self.workflow.step_names and not op_of(node).serves_step:  # a ControlNet may be beside
            self.step_ranks = ranks

    def note_answer(self, node: Node) -> None:
        """Note that a node's oldest run in flight has been answered. To be called before progress is changed."""
        self.sent_to.pop((node.name, self.progress.done[node.name] + 1 if node.region else 0), None)

    def ranks_running(self, node: Node) -> list[RankIds]:
        """The ranks of each run of a node in flight."""
        return [ranks for (name, _), ranks in self.sent_to.items() if name == node.name]

    def note_mask(self, num_active: int, score: float) -> None:
        """Note the mask that was found: how the request runs depends on it. num_active: its active tokens."""
        spec = self.head.spec
        assert isinstance(spec, EditSpec | MaskSpec)
        self.spec, self.active_tokens, self.mask_score = spec.with_mask(num_active), num_active, score
        self.known_sizes.clear()
        self.known_work.clear()

    @property
    def awaits_mask(self) -> bool:
        """Whether its mask is to be found first, so that what its steps compute is a prediction."""
        return self.active_tokens is None and isinstance(self.spec, EditSpec) and self.spec.search is not None

    def note_run(self, start: float, end: float) -> None:
        """Note that a worker has run a node of the request. Times are monotonic seconds."""
        self.started = start if self.started is None else min(self.started, start)
        self.made = end if self.made is None else max(self.made, end)

    def lose_rank(self, rank: int) -> None:
        """Note that a rank has died with everything that it had."""
        if rank in self.ranks:
            self.has_lost_rank = True
            self.fixed_inputs.clear()
            self.step_ranks = () if rank in self.step_ranks else self.step_ranks
            self.sent_to = {run: tuple(r for r in ranks if r != rank) for run, ranks in self.sent_to.items()}

    @property
    def runs_alone(self) -> bool:
        """Whether no other request may run beside it."""
        return self.num_deaths >= SUSPECT_DEATHS

    @property
    def has_work_in_flight(self) -> bool:
        """Whether a worker has batches or transfers of the request."""
        return self.progress.num_in_flight > 0 or self.num_moving > 0

    @property
    def is_live(self) -> bool:
        """Whether the request has not ended."""
        return self.status is Status.WAITING or self.status is Status.RUNNING

    def move_to(self, status: Status) -> None:
        """Change status; an illegal transition raises ValueError."""
        if status not in TRANSITIONS[self.status]:
            raise ValueError(f"request {self.id}: illegal move {self.status.value} -> {status.value}")
        self.status = status


def _check_given(spec: Spec, workflow: Workflow) -> None:
    """Raises InvalidRequestError if a request lacks what its workflow needs, or gives what that does not take."""
    if isinstance(spec, RunSpec) is workflow.is_for_pictures:
        picture, values = "a picture", "values of classes"
        made, asked = (picture, values) if workflow.is_for_pictures else (values, picture)
        message = f"workflow {workflow.title} makes {made}, and the request asks for {asked}; name another"
        raise InvalidRequestError(message, param="workflow")
    own = workflow.own_inputs
    required = [port for port in workflow.inputs if not port.is_optional]
    given = {port.name: port.name in spec.inputs if port in own else spec.gives(port.name) for port in required}
    lacking = [(name, name) for name, is_given in given.items() if not is_given]
    _check_arrays(spec, workflow)
    if isinstance(spec, PictureSpec):
        _check_picture(spec, workflow)
        lacking += [(f"a canvas {name}", "canvases") for name in workflow.canvases if name not in spec.canvases]
    lacking += [(f"memory for its {name}", "outputs") for name in workflow.outputs if name not in spec.outputs]
    for what, param in lacking:
        raise InvalidRequestError(f"workflow {workflow.title} takes {what}", param=param)


def _check_picture(spec: PictureSpec, workflow: Workflow) -> None:
    """Raises InvalidRequestError where the picture is larger than a node with ports of its own takes, and for previews
    that would not pass through such a node.
    """
    between = workflow.last_between
    if spec.previews and between is not None and not workflow.side_nodes:
        message = f"workflow {workflow.title} shows no previews, which would not pass through {between.name}"
        raise InvalidRequestError(message, param="partial_images")
    size = spec.height, spec.width, 3
    for node, port in workflow.picture_ports:
        if port.form is not None and (problem := port.form.why_not(size, "uint8")):
            message = f"workflow {workflow.title}, node {node.name}, {port.name}: {problem}; ask for a smaller picture"
            raise InvalidRequestError(message, param="size")


def _check_arrays(spec: Spec, workflow: Workflow) -> None:
    """Raises InvalidRequestError for an array that is not as the workflow declares it."""
    ports = {port.name: port for port in workflow.own_inputs}
    for name, array in spec.inputs.items():
        form = ports[name].form if name in ports else None
        if form is None:
            known = ", ".join(ports) or "none"
            raise InvalidRequestError(f"workflow {workflow.title} has no input {name}; there are {known}", param=name)
        if problem := form.why_not(array.shape, array.dtype):
            raise InvalidRequestError(f"workflow {workflow.title}, input {name}: {problem}", param=name)
