"""RequestShape: what routing and admission know of a request: its sizes, from which its work is predicted."""

from __future__ import annotations

from dataclasses import dataclass

from core.messages.engine import EngineRequest, PrimeTemplate
from core.model_info import ModelInfo
from core.routing.fleet_costs import Features, work_features


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
    # The first of two passes, 0 without one. Its steps are among `num_steps`; it has the text tokens of the second.
    first_steps: int = 0
    first_tokens: int = 0  # image tokens

    @classmethod
    def of_request(cls, request: EngineRequest, info: ModelInfo) -> RequestShape:
        spec, scheme = request.spec, info.page_scheme
        num_steps, num_tokens = sum(request.rounds), spec.num_tokens
        full_steps, active_tokens = num_steps, num_tokens
        pages: tuple[str | None, int, int] = None, 0, 0
        if spec.is_mask_aware and scheme is not None:
            full_steps, active_tokens = spec.num_full_steps(0, num_steps), spec.active.size
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
            first_steps=request.rounds[0] if spec.first_pass else 0,
            first_tokens=spec.first_pass.num_tokens if spec.first_pass else 0,
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
    def step_features(self) -> Features:
        """Features of what it adds to a step, the mean over its steps."""
        features = self._row_features
        return features if self.num_rows == 1 else tuple(self.num_rows * feature for feature in features)

    @property
    def _row_features(self) -> Features:
        every = self.image_tokens + self.condition_tokens + self.text_tokens
        active = self.active_tokens + self.text_tokens
        if self.first_steps:
            first = self.first_tokens * (self.image_tokens + self.condition_tokens) // self.image_tokens
            small = first + self.text_tokens
            share = self.first_steps / self.num_steps
            return _mixed(share, work_features(small, small, 0.0), work_features(every, every, 0.0))
        if self.full_steps == self.num_steps:
            return work_features(every, every, 0.0)
        masked = work_features(active, every, 0.0)
        if not self.full_steps:
            return masked
        return _mixed(self.full_steps / self.num_steps, work_features(every, every, 0.0), masked)


def _mixed(share: float, some: Features, others: Features) -> Features:
    """Mean features of steps of which a share, 0..1, has those of `some`."""
    return tuple(share * one + (1 - share) * other for one, other in zip(some, others, strict=True))
