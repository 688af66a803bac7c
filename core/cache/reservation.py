"""Reservation: the entries of the activation cache that one edit, or one template request, needs and holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from core.cache.entry import Want
from core.cache.priming import TemplateInfo
from core.handles import ArrayRef, Tier
from core.page_scheme import page_key


@dataclass(slots=True)
class Reservation:
    """What one edit, or one registration of a template, needs and holds of the cache."""

    owner_id: str
    template: TemplateInfo
    pixels: ArrayRef  # uint8 [height, width, 3], valid until the owner's terminal message
    sigmas: tuple[float, ...] = ()  # keyframes it needs, falling
    is_reserved: bool = False
    is_complete: bool = False  # every entry it needs has been filled; none can go while it is held
    is_read: bool = False  # a worker reads `pixels` on behalf of a job
    is_idle_work: bool = False  # only to be primed when nothing else wants to compute
    is_prefetch: bool = False  # its owner waits for a place: what other tiers have is loaded, nothing is primed
    is_given_up: bool = False  # its template could not be primed, and its owner is told so
    full_blocks: tuple[int, ...] = ()  # that the next step computes in full, instead of waiting for their pages
    is_primed: bool = False  # something had to be computed for it
    tier: Tier | None = None  # the slowest tier that something it needs came from
    came_from: dict[str, Tier | None] = field(default_factory=dict)  # entry -> where it lay when it was reserved
    prime_seconds: float = 0.0  # worker time spent on its template's pages while it waited

    def entry_keys(self) -> list[str]:
        """The entries it needs, clean latents first."""
        return [self.template.latents_key, *(page_key(self.template.key, sigma) for sigma in self.sigmas)]

    def wants(self) -> list[Want]:
        template, layout = self.template, self.template.scheme.layout
        latent_bytes = template.scheme.latent_entry_bytes(template.num_tokens)
        entry_bytes, block_bytes = layout.entry_bytes(template.num_tokens), layout.block_bytes(template.num_tokens)
        latents, *pages = self.entry_keys()
        return [Want(latents, latent_bytes, latent_bytes), *(Want(key, entry_bytes, block_bytes) for key in pages)]

    @property
    def result(self) -> Literal["hit", "miss"]:
        return "miss" if self.is_primed else "hit"
