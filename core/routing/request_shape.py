"""RequestShape: what routing and admission know of a request: its sizes, from which its work is predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from core.graph.catalog import WORKFLOWS
from core.graph.workflow import Workflow, role_of
from core.messages.engine import EngineRequest, PrimeTemplate
from core.model_info import ModelInfo
from core.routing.fleet_costs import Encoding, Features, work_features


class Loop(NamedTuple):
    """A loop of denoising steps."""

    model: str
    steps: int
    image_tokens: int  # of a row


@dataclass(frozen=True)
class RequestShape:
    """The properties of an edit that routing needs, or of a template to prime (which has no steps). Made from the
    request by `of_request` and `of_template`.
    """

    model: str
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
    owner: str = ""  # see EngineRequest
    # The nodes of its workflow beside those of the plain one: of other models, and at other sizes.
    loops: tuple[Loop, ...] = ()  # steps, which are among `num_steps` and compute all tokens
    encodings: tuple[Encoding, ...] = ()  # nodes that run once

    @classmethod
    def of_request(cls, request: EngineRequest, info: ModelInfo) -> RequestShape:
        """info: of the request's model."""
        spec, scheme, workflow = request.spec, info.page_scheme, WORKFLOWS[request.workflow]

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
            pages = template, num_keyframes, scheme.layout.entry_bytes(num_tokens)
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
            owner=request.owner,
            loops=loops_of(workflow, info, request.rounds, tokens_of),
            encodings=_encodings(workflow, info, tokens_of),
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
        beside = info.conditions_per_token * tokens
        return cls(prime.model, 0, 0, tokens, tokens, text, key, num_keyframes, entry_bytes, condition_tokens=beside)

    @property
    def step_features(self) -> dict[str, Features]:
        """Model -> features of what it adds to a step, the mean over all of its steps."""
        found = {self.model: self._row_features}
        if self.loops:
            own = self.num_steps - sum(loop.steps for loop in self.loops)
            found[self.model] = _times(own / self.num_steps, self._row_features)
        for loop in self.loops:
            share = _times(loop.steps / self.num_steps, self._loop_features(loop))
            found[loop.model] = _sum(found[loop.model], share) if loop.model in found else share
        return found if self.num_rows == 1 else {name: _times(self.num_rows, each) for name, each in found.items()}

    def _loop_features(self, loop: Loop) -> Features:
        beside = loop.image_tokens * (self.image_tokens + self.condition_tokens) // self.image_tokens
        return work_features(beside + self.text_tokens, beside + self.text_tokens, 0.0)

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
    """The loops of a request beside those of the plain workflow. info: of its model. rounds: of the regions."""
    steps = dict(zip((region.name for region in workflow.regions), rounds, strict=True))
    players = ((node, info.roles.get(role_of(node), info.name)) for node in workflow.steps)
    others = ((node, model) for node, model in players if node.canvas or model != info.name)
    return tuple(Loop(model, steps[node.region], tokens_of(node.canvas)) for node, model in others)


def _encodings(workflow: Workflow, info: ModelInfo, tokens_of: TokensOf) -> tuple[Encoding, ...]:
    once = (node for node in workflow.nodes if not (node.region or node.shows))
    players = ((node, info.roles.get(role_of(node), info.name)) for node in once)
    others = ((node, model) for node, model in players if node.canvas or model != info.name)
    return tuple(Encoding(model, node.op, tokens_of(node.canvas)) for node, model in others)


def _mixed(share: float, some: Features, others: Features) -> Features:
    """Mean features of steps of which a share, 0..1, has those of `some`."""
    return _sum(_times(share, some), _times(1 - share, others))


def _times(number: float, features: Features) -> Features:
    return tuple(number * each for each in features)


def _sum(some: Features, others: Features) -> Features:
    return tuple(one + other for one, other in zip(some, others, strict=True))
