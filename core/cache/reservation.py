"""Reservation: the entries of the activation cache that one edit, or one template request, needs and pins."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.cache.entry import WantedEntry
from core.cache.priming import TemplateInfo
from core.handles import ArrayRef, Tier
from core.page_scheme import page_key


@dataclass(slots=True)
class Reservation:
    """The entries that an edit or a template request needs. Written by PageReservations unless commented otherwise."""

    # Set by its maker: the RequestPrefetcher, or for a template request TemplateRequests.
    owner_id: str  # id of the edit or template request
    template: TemplateInfo
    pictures: tuple[ArrayRef, ...]  # the template and its references, uint8 [height, width, 3] each; valid until the
    # owner's terminal message
    sigmas: tuple[float, ...] = ()  # keyframes it needs, falling; reduced by `narrow` and `trim`
    # Noise level of a step -> keys of the entries that it reads, and the weight of the second.
    entries_at: dict[float, tuple[tuple[str, ...], float]] = field(default_factory=dict)
    # Its state.
    is_reserved: bool = False  # its entries are pinned
    # All its entries have been filled. They are pinned: none is evicted, but a device's may be lost with its rank.
    is_complete: bool = False
    is_read: bool = False  # a worker reads `pictures` for a priming job
    owner: str = ""  # set by its maker: see EngineRequest
    is_idle_work: bool = False  # set by its maker: primed only when there is no other work
    is_prefetch: bool = False  # set by its maker: its owner waits for a slot; entries are loaded, but not primed
    is_given_up: bool = False  # priming failed, and so does its owner
    # What became of it, for the owner's terminal message.
    is_primed: bool = False  # at least one of its entries had to be primed
    tier: Tier | None = None  # the slowest tier that any of its entries came from
    came_from: dict[str, Tier | None] = field(default_factory=dict)  # entry key -> its tier when it was reserved
    prime_seconds: float = 0.0  # worker time spent on its template's pages while it waited

    def entry_keys(self) -> list[str]:
        """Keys of the entries it needs, clean latents first."""
        return [self.template.latents_key, *(page_key(self.template.key, sigma) for sigma in self.sigmas)]

    def wants(self, *, shares_latents: bool = False) -> list[WantedEntry]:
        """shares_latents: other ranks than the one that reads the pages read the clean latents, too."""
        template, layout = self.template, self.template.scheme.layout
        latent_bytes = template.scheme.latent_entry_bytes(template.num_latent_tokens)
        entry_bytes, block_bytes = layout.entry_bytes(template.num_tokens), layout.block_bytes(template.num_tokens)
        latents, *pages = self.entry_keys()
        first = WantedEntry(latents, latent_bytes, latent_bytes, shares_latents)
        return [first, *(WantedEntry(key, entry_bytes, block_bytes) for key in pages)]
