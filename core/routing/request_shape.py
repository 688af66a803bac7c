"""RequestShape: what routing and admission know of a request: its sizes, from which its work is predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from core.control import Control
from core.costs.load_report import WeightsKind
from core.graph.catalog import WORKFLOWS
from core.graph.workflow import Node, Workflow, op_of, role_of
from core.handles import ArrayRef
from core.messages.engine import EngineRequest, PrimeTemplate
from core.messages.request_arrays import Copied, copied
from core.messages.specs import RunSpec
from core.model_info import ModelInfo
from core.routing.fleet_costs import WORKFLOW, Encoding, Features, work_features
from core.routing.weights import Weights
from core.scheduling.ops.run import RUN
from core.scheduling.ops.segment import SEGMENT


class Loop(NamedTuple):
    """A loop of denoising steps."""

    model: str
    steps: int
    image_tokens: int  # of a row
    is_final: bool = False  # at the size of the final picture


@dataclass(frozen=True)
class RequestShape:
    """The properties of an edit that routing needs, or of a template to prime (which has no steps). Made from the
    request by `of_request` and `of_template`.
    """

    model: str  # "": none, users' classes compute it
    # Steps.
    num_steps: int  # denoising steps
    full_steps: int  # steps that compute all tokens; the others compute active and text tokens
    # Tokens of a row.
    active_tokens: int
    image_tokens: int
    text_tokens: int
    # The template.
    template: str | None = None  # PageScheme.template_key; None for an edit that reads no template's pages
    num_keyframes: int = 0  # most keyframes of its template that it reads
    entry_bytes: int = 0  # bytes of a keyframe's pages
    # The rest.
    priority: int = 0  # lower goes first
    num_rows: int = 1  # of a step, see SamplingParams
    condition_tokens: int = 0  # of a row; computed by full steps alone
    reference_tokens: int = 0  # those of them that are of references
    paged_reference_tokens: int = 0  # the same, if no step computes them
    owner: str = ""  # see EngineRequest
    # What its workflow has beside the plain one.
    denoiser: str = ""  # the model that makes its steps; "": its own
    loops: tuple[Loop, ...] = ()  # further loops, whose steps are among `num_steps` and compute all tokens
    encodings: tuple[Encoding, ...] = ()  # all nodes that run once; (): those of the plain workflow
    needed: tuple[Weights, ...] = ()  # what has to be loaded for it, as far as engines report it
    # Its ControlNets.
    controlnets: tuple[str, ...] = ()  # names, in alphabetical order
    num_controls: int = 0  # control pictures
    steered: tuple[Loop, ...] = ()  # for each loop, the steps that they steer
    # Itself, for what is asked of it only where engines are on other machines; None: it is not there yet.
    request: EngineRequest | PrimeTemplate | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of_request(
        cls, request: EngineRequest, info: ModelInfo, workflows: Mapping[str, Workflow] = WORKFLOWS
    ) -> RequestShape:
        """info: of the request's model. workflows: by name."""
        spec, scheme = request.spec, info.page_scheme
        assert not isinstance(spec, RunSpec), "it is of no model"
        workflow = workflows[request.workflow]

        def tokens_of(canvas: str) -> int:
            return spec.canvas(canvas).num_tokens

        num_steps, num_tokens = sum(request.rounds), spec.num_tokens
        full_steps, active_tokens = num_steps, num_tokens
        pages: tuple[str | None, int, int] = None, 0, 0
        if spec.is_mask_aware and scheme is not None:
            full_steps = spec.num_full_steps(0, num_steps)
            active_tokens = spec.num_active_tokens - spec.num_text_tokens
        if spec.reads_template and scheme is not None:
            template = scheme.template_key(spec.content_id, spec.cache_salt, spec.patches)
            num_keyframes = len(scheme.keyframes) or num_steps - full_steps
            layout = scheme.layout.with_conditions(spec.num_condition_tokens) if spec.references else scheme.layout
            pages = template, num_keyframes, layout.entry_bytes(num_tokens)
        tokens = active_tokens, num_tokens, spec.num_text_tokens
        return cls(
            request.model,
            num_steps,
            full_steps,
            *tokens,
            *pages,
            priority=request.priority,
            num_rows=spec.num_rows,
            condition_tokens=spec.num_condition_tokens,
            reference_tokens=spec.num_reference_tokens,
            paged_reference_tokens=spec.num_paged_reference_tokens,
            owner=request.owner,
            denoiser=info.name if workflow.paged is None else _player(info, workflow.paged),
            loops=loops_of(workflow, info, request.rounds, tokens_of),
            encodings=encodings_of(workflow, info, tokens_of, spec.inputs),
            needed=_needed(workflow, request.model, spec.controlnets),
            controlnets=spec.controlnets,
            num_controls=len(spec.controls),
            steered=steered_of(workflow, info, request.rounds, spec.controls, tokens_of),
            request=request,
        )

    @classmethod
    def of_run(cls, request: EngineRequest, workflow: Workflow) -> RequestShape:
        """workflow: of users' classes, whose names are its roles. What they cost is known to engines alone."""
        return cls(
            "",
            *(0, 0, 0, 0, 0),
            priority=request.priority,
            owner=request.owner,
            encodings=(Encoding("", RUN.name, 0),),
            needed=_needed(workflow, ""),
            request=request,
        )

    @classmethod
    def of_template(cls, prime: PrimeTemplate, info: ModelInfo) -> RequestShape:
        """The model must have a page scheme with keyframes."""
        scheme = info.page_scheme
        assert scheme is not None
        tokens, entry_bytes = prime.num_tokens, scheme.layout.entry_bytes(prime.num_tokens)
        text = info.max_text_tokens + info.text_tokens_beside(prime.width, prime.height)
        key = scheme.template_key(prime.content_id, prime.cache_salt, prime.patches)
        num_keyframes = len(scheme.keyframes)
        beside = info.num_condition_tokens(tokens, has_template=True)
        sizes = tokens, tokens, text, key, num_keyframes, entry_bytes
        needed = (Weights(prime.model),)
        return cls(prime.model, 0, 0, *sizes, condition_tokens=beside, needed=needed, request=prime)

    @cached_property
    def copied(self) -> Copied:
        """What is copied for it to engines of other machines, and back."""
        return Copied(0, 0) if self.request is None else copied(self.request)

    @property
    def step_features(self) -> dict[str, Features]:
        """Model -> features of what it adds to a step, the mean over all of its steps."""
        own = self.denoiser or self.model
        found = {own: self._row_features}
        if self.loops:
            others = sum(loop.steps for loop in self.loops)
            found[own] = _times((self.num_steps - others) / self.num_steps, self._row_features)
        for loop in self.loops:
            share = _times(loop.steps / self.num_steps, self._loop_features(loop))
            found[loop.model] = _sum(found[loop.model], share) if loop.model in found else share
        return found if self.num_rows == 1 else {name: _times(self.num_rows, each) for name, each in found.items()}

    def _loop_features(self, loop: Loop) -> Features:
        scaled = self.image_tokens + self.condition_tokens - self.reference_tokens
        beside = loop.image_tokens * scaled // self.image_tokens + self.reference_tokens
        return work_features(beside + self.text_tokens, beside + self.text_tokens, 0.0)

    @property
    def control_features(self) -> Features:
        """Features of what its ControlNets compute beside a step, in a pass of their own; the mean over all of its
        steps."""
        passes = [(loop.steps / self.num_steps, self._pass_features(loop)) for loop in self.steered]
        return tuple(map(sum, zip(*(_times(share, features) for share, features in passes), strict=True)))

    def _pass_features(self, loop: Loop) -> Features:
        """They compute no condition tokens, and attend to what they compute."""
        every, active = loop.image_tokens + self.text_tokens, self.active_tokens + self.text_tokens
        row = work_features(every, every, 0.0)
        if loop.is_final:
            row = _mixed(self.full_steps / self.num_steps, row, work_features(active, active, 0.0))
        _, *added = _times(self.num_rows * self.num_controls, row)
        return 1.0, *added

    @property
    def _row_features(self) -> Features:
        every = self.image_tokens + self.condition_tokens + self.text_tokens
        active = self.active_tokens + self.text_tokens
        if self.full_steps == self.num_steps:
            return work_features(every, every, 0.0)
        masked = work_features(active, every, 0.0)
        if not self.full_steps:
            return masked
        return _mixed(self.full_steps / self.num_steps, work_features(every, every, 0.0), masked)


TokensOf = Callable[[str], int]
"""Name of a canvas -> its image tokens."""


def loops_of(workflow: Workflow, info: ModelInfo, rounds: Sequence[int], tokens_of: TokensOf) -> tuple[Loop, ...]:
    """A request's loops of steps but for the one that may read pages. info: of its model. rounds: of the regions."""
    steps = dict(zip((region.name for region in workflow.regions), rounds, strict=True))
    others = (node for node in workflow.counted_steps if node is not workflow.paged)
    return tuple(
        Loop(_player(info, node), steps[node.region], tokens_of(node.canvas), not node.canvas) for node in others
    )


def steered_of(
    workflow: Workflow, info: ModelInfo, rounds: Sequence[int], controls: Sequence[Control], tokens_of: TokensOf
) -> tuple[Loop, ...]:
    """For each of a request's loops, the steps that ControlNets of its own model steer. controls: with a scale."""
    steps = dict(zip((region.name for region in workflow.regions), rounds, strict=True))

    def num_steered(number: int) -> int:
        return sum(any(each.scale and each.steers(step, number) for each in controls) for step in range(number))

    nodes = (node for node in workflow.steps if op_of(node).serves_step)
    return tuple(
        Loop(info.name, num_steered(steps[node.region]), tokens_of(node.canvas), not node.canvas) for node in nodes
    )


def encodings_of(
    workflow: Workflow, info: ModelInfo, tokens_of: TokensOf, given: Mapping[str, ArrayRef] = MappingProxyType({})
) -> tuple[Encoding, ...]:
    """Its nodes that run once, unless they are those of the plain workflow, run by its own model. given: inputs for
    nodes of users' classes, as far as they are known.
    """
    once = [node for node in workflow.nodes if not (node.region or node.shows)]
    if not info.roles and all(node in WORKFLOW.nodes for node in once):
        return ()
    pixels = tokens_of("") * info.token_size**2

    def size(node: Node) -> int:
        return _num_elements(workflow, node, 3 * pixels, given) if _is_run(node) else tokens_of(node.canvas)

    return tuple(Encoding(_player(info, node), node.op, size(node)) for node in once)


def _num_elements(workflow: Workflow, node: Node, decoded: int, given: Mapping[str, ArrayRef]) -> int:
    """Elements of the inputs of a user's class: those of decoded pictures, and of what the request gives. What other
    classes make is not known before, and counts as one.
    """
    sources = (workflow.node(edge.source) for edge in node.inputs)
    arrays = (given.get(name) for name in node.given.values())
    made = sum(1 if _is_run(source) else decoded for source in sources)
    return made + sum(1 if array is None else array.size for array in arrays) + len(node.literals)


def _is_run(node: Node) -> bool:
    return op_of(node).has_own_ports


def _needed(workflow: Workflow, model: str, controlnets: Iterable[str] = ()) -> tuple[Weights, ...]:
    """What has to be loaded for requests of a model, "": of none, that use these of its ControlNets."""
    kinds = sorted({_weights_kind(node) for node in workflow.nodes if not _is_run(node)})
    classes = dict.fromkeys(Weights(role_of(node), "class") for node in workflow.nodes if _is_run(node))
    nets = (Weights(model, "controlnet", name) for name in controlnets)
    return (*(Weights(model, kind) for kind in kinds), *nets, *classes)


def _weights_kind(node: Node) -> WeightsKind:
    return "segmenter" if node.op == SEGMENT.name else "model"


def _player(info: ModelInfo, node: Node) -> str:
    """Name of the model that runs a node for requests of this one, or of the class."""
    return role_of(node) if _is_run(node) else info.roles.get(role_of(node), info.name)


def _mixed(share: float, some: Features, others: Features) -> Features:
    """Mean features of steps of which a share, 0..1, has those of `some`."""
    return _sum(_times(share, some), _times(1 - share, others))


def _times(number: float, features: Features) -> Features:
    return tuple(number * each for each in features)


def _sum(some: Features, others: Features) -> Features:
    return tuple(one + other for one, other in zip(some, others, strict=True))
