"""OwnPages: the pages that a full step of a request makes for the request's own later steps.

They are a cache of a function of the latents before that step: a rank that lacks them, because the step ran elsewhere,
computes them again from these. So neither a rank's death nor a change of ranks changes a picture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from core.page_scheme import PageLayout
from model_executor.page_cache.pages import PageEntry, Pages, Quantise


@dataclass(frozen=True, slots=True)
class OwnPages:
    """One row's pages, in this rank's memory, and what they are made from."""

    layout: PageLayout
    num_tokens: int  # image tokens of the picture
    entry: Tensor  # uint8 [entry bytes], written in place
    made: Tensor  # int64 [3] in host memory: (step that has made what is in it, its first head, after its last); step
    # -1: nothing. Written in place.
    step: int  # the step whose pages are wanted
    latents: Tensor  # [image tokens, latent width], what the denoiser read in that step
    sigma: Tensor  # float32 scalar, its noise level
    modulation: Tensor | None  # its row of the modulation table, see `Row`
    heads: tuple[int, int] | None = None  # (first, after the last) that this rank computes; None: all

    @staticmethod
    def room(layout: PageLayout, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(entry, made) without pages."""
        entry = torch.empty(layout.entry_bytes(num_tokens), dtype=torch.uint8, device=device)
        return entry, torch.tensor([-1, 0, 0])

    @property
    def pages(self) -> Pages:
        """To read them."""
        return Pages(self.layout, self.num_tokens, near=self.entry, far=None, weight=0.0, heads=self.heads)

    def with_heads(self, heads: tuple[int, int] | None) -> Self:
        """The same, of which only these heads are computed and read."""
        return replace(self, heads=heads)

    @property
    def are_there(self) -> bool:
        """Whether this rank has those of its heads."""
        step, first, end = self.made.tolist()
        wanted = self._heads
        return step == self.step and ((first <= wanted[0] and wanted[1] <= end) or wanted[0] == wanted[1])

    def writer(self, quantise: Quantise) -> PageEntry:
        """The entry to write its heads to. They count as missing until `note_made`."""
        self.made[0] = -1
        return PageEntry(self.entry, self.layout, self.num_tokens, quantise).of_heads(self.heads)

    def note_made(self) -> None:
        """Note that its heads are written."""
        self.made.copy_(torch.tensor([self.step, *self._heads]))

    @property
    def _heads(self) -> tuple[int, int]:
        return self.heads or (0, self.layout.num_heads)
