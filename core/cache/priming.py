"""PrimingJob: computes the pages of one template, chunk by chunk.

The noisy latents at any noise level follow from the clean ones in closed form, so keyframes do not depend on each
other: they are primed in the order in which steps need them (falling noise), several in one pass where the token budget
allows. A chunk is a pass over a range of blocks, since a block needs all tokens' output of the block before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.page_scheme import PageScheme, latents_key
from core.patches import PatchSet

if TYPE_CHECKING:
    from core.messages.engine import PrimeTemplate
    from core.messages.specs.picture_spec import PictureSpec
    from core.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class TemplateInfo:
    """A template and how its pages are made. Taken from the request and the model by `of`."""

    # Identity.
    key: str  # PageScheme.template_key: digest of all that its pages depend on except the noise level, and of the owner
    model: str
    scheme: PageScheme  # of the model
    content_id: str  # see PreparedImages
    # Size.
    width: int  # px
    height: int  # px
    num_tokens: int  # image tokens
    max_text_tokens: int  # length to which the priming prompt is padded or cut
    extra_text_tokens: int = 0  # see ModelInfo.text_tokens_beside
    num_condition_tokens: int = 0
    num_reference_tokens: int = 0  # those of them that are of references
    reference_sizes: tuple[tuple[int, int], ...] = ()  # (width, height) in px
    # The rest.
    is_seen_by_text: bool = False  # the text encoder sees its pixels
    cache_salt: str = ""  # see CacheConfig.salt
    patches: PatchSet = ()

    @classmethod
    def of(
        cls, asked: PictureSpec | PrimeTemplate, info: ModelInfo, references: tuple[tuple[int, int], ...] = ()
    ) -> TemplateInfo:
        """The template of a request or a template request. info: of its model, which must have a page scheme.
        references: their sizes in pixels."""
        scheme = info.page_scheme
        assert scheme is not None
        beside = info.num_reference_tokens(references)
        conditions = info.num_condition_tokens(asked.num_tokens, has_template=True, reference_tokens=beside)
        return cls(
            scheme.template_key(asked.content_id, asked.cache_salt, asked.patches),
            info.name,
            scheme.with_conditions(conditions) if references else scheme,
            asked.content_id,
            asked.width,
            asked.height,
            asked.num_tokens,
            info.max_text_tokens,
            info.text_tokens_beside(asked.width, asked.height, references),
            conditions,
            beside,
            references,
            info.vision is not None,
            asked.cache_salt,
            asked.patches,
        )

    @property
    def latents_key(self) -> str:
        """Key of the entry with its clean latents."""
        return latents_key(self.key)

    @property
    def num_latent_tokens(self) -> int:
        """Tokens that the entry with its clean latents holds: the references' follow the template's."""
        return self.num_tokens + self.num_reference_tokens

    @property
    def pass_tokens(self) -> int:
        """Tokens that one keyframe's pass computes in every block."""
        text_tokens = self.max_text_tokens + self.extra_text_tokens
        return self.num_tokens + self.num_condition_tokens + text_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a job: some keyframes together through a range of blocks."""

    sigmas: tuple[float, ...]  # noise levels of the keyframes
    blocks: tuple[int, int]  # [start, stop)
    tokens: int  # charged to the token budget


@dataclass(slots=True)
class PrimingJob:
    """The entries of one template that have to be filled, and the progress made. Written by PageReservations."""

    id: str  # names its tensors in the worker's store
    template: TemplateInfo
    wanted: dict[float, str] = field(default_factory=dict)  # noise level -> entry still to be filled
    is_in_flight: bool = False
    seconds: float = 0.0  # worker time so far
    rank: int | None = None  # that computes the passes under way; None: there are none
    _sigmas: tuple[float, ...] = ()  # of the passes under way
    _blocks_done: int = 0  # of these passes

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Noise levels of the passes under way."""
        return self._sigmas

    def plan_chunk(self, token_budget: int) -> Chunk:
        """The next chunk within a token budget, at least one block of one keyframe. `wanted` must not be empty."""
        sigmas = self._sigmas or self._next_sigmas(token_budget)
        num_blocks, tokens = self.template.scheme.layout.num_blocks, len(sigmas) * self.template.pass_tokens
        left = num_blocks - self._blocks_done
        blocks = min(left, max(1, token_budget * num_blocks // tokens))
        start = self._blocks_done
        return Chunk(sigmas, (start, start + blocks), -(-tokens * blocks // num_blocks))

    def start_chunk(self, chunk: Chunk, rank: int = 0) -> None:
        """Record that a chunk made by `plan_chunk` is computed now, on this rank."""
        self._sigmas, self.rank = chunk.sigmas, rank

    def finish_chunk(self, chunk: Chunk) -> list[str]:
        """Record that a chunk is done; returns the keys of the entries that it has completed."""
        self._blocks_done = chunk.blocks[1]
        if self._blocks_done < self.template.scheme.layout.num_blocks:
            return []
        filled = [self.wanted.pop(sigma) for sigma in self._sigmas]
        self.end_passes()
        return filled

    def forget(self, sigma: float) -> None:
        """Remove a keyframe from `wanted`; passes under way continue without it."""
        del self.wanted[sigma]
        self._sigmas = tuple(other for other in self._sigmas if other != sigma)
        if not self._sigmas:
            self.end_passes()

    def end_passes(self) -> None:
        """End the passes under way; what they have not filled is still wanted."""
        self._sigmas, self._blocks_done, self.rank = (), 0, None

    def _next_sigmas(self, token_budget: int) -> tuple[float, ...]:
        together = max(1, token_budget // self.template.pass_tokens)
        return tuple(sorted(self.wanted, reverse=True)[:together])
