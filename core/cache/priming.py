"""PrimingJob: how the pages of one template come about, chunk by chunk.

For a clean latent the noisy ones at any noise level are known in closed form, so keyframes do not depend on each other:
they are primed in the order that steps need them (noise falling), several in one pass where the token budget has room.
A chunk is a pass over a range of blocks, since a block needs every token's output of the block before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.page_scheme import PageScheme, latents_key

if TYPE_CHECKING:
    from core.messages.engine import EditRequest, PrimeTemplate
    from core.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class TemplateInfo:
    """The template of a job: whose pages, made how. key: digest of all they depend on but the noise level, and of
    whose they are. The counts of tokens are as in EditRequest."""

    key: str
    model: str
    scheme: PageScheme
    content_id: str
    width: int
    height: int
    num_tokens: int
    max_text_tokens: int
    extra_text_tokens: int = 0
    num_condition_tokens: int = 0
    is_seen_by_text: bool = False  # the text encoder sees its pixels
    cache_salt: str = ""

    @classmethod
    def of(cls, asked: EditRequest | PrimeTemplate, info: ModelInfo) -> TemplateInfo:
        """Of what an edit, or who registers it, asks for. info: of its model, which caches templates."""
        assert info.page_scheme is not None
        return cls(
            info.page_scheme.template_key(asked.content_id, asked.cache_salt),
            asked.model,
            info.page_scheme,
            asked.content_id,
            asked.width,
            asked.height,
            asked.num_tokens,
            info.max_text_tokens,
            info.text_tokens_beside(asked.width, asked.height),
            info.conditions_per_token * asked.num_tokens,
            info.vision is not None,
            asked.cache_salt,
        )

    @property
    def latents_key(self) -> str:
        """The entry with its clean latents."""
        return latents_key(self.key)

    @property
    def pass_tokens(self) -> int:
        """Tokens that one keyframe's pass computes in every block."""
        text_tokens = self.max_text_tokens + self.extra_text_tokens
        return self.num_tokens + self.num_condition_tokens + text_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next piece of a job: these keyframes together through blocks [start, stop). tokens: what it takes of the
    token budget.
    """

    sigmas: tuple[float, ...]
    blocks: tuple[int, int]
    tokens: int


@dataclass(slots=True)
class PrimingJob:
    """Entries of one template that have to be filled, and how far that is. `wanted` is written by PageReservations."""

    id: str  # names its tensors in the worker's store
    template: TemplateInfo
    wanted: dict[float, str] = field(default_factory=dict)  # noise level -> entry still to be filled
    is_in_flight: bool = False
    seconds: float = 0.0  # worker time so far
    _sigmas: tuple[float, ...] = ()  # of the passes under way
    _blocks_done: int = 0  # of these passes

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Noise levels of the passes under way."""
        return self._sigmas

    def next_chunk(self, token_budget: int) -> Chunk:
        """What to compute next with so many tokens: at least one block of one keyframe. There must be something
        wanted.
        """
        if not self._sigmas:
            self._begin_passes(token_budget)
        num_blocks, tokens = self.template.scheme.layout.num_blocks, len(self._sigmas) * self.template.pass_tokens
        left = num_blocks - self._blocks_done
        blocks = min(left, max(1, token_budget * num_blocks // tokens))
        start = self._blocks_done
        return Chunk(self._sigmas, (start, start + blocks), -(-tokens * blocks // num_blocks))

    def finish_chunk(self, chunk: Chunk) -> list[str]:
        """Record that a chunk is done; the entries that are full now."""
        self._blocks_done = chunk.blocks[1]
        if self._blocks_done < self.template.scheme.layout.num_blocks:
            return []
        filled = [self.wanted.pop(sigma) for sigma in self._sigmas]
        self._sigmas, self._blocks_done = (), 0
        return filled

    def forget(self, sigma: float) -> None:
        """This keyframe is not wanted any more; a pass under way goes on without it."""
        del self.wanted[sigma]
        self._sigmas = tuple(other for other in self._sigmas if other != sigma)
        if not self._sigmas:
            self._blocks_done = 0

    def _begin_passes(self, token_budget: int) -> None:
        together = max(1, token_budget // self.template.pass_tokens)
        self._sigmas = tuple(sorted(self.wanted, reverse=True)[:together])
